//! `Setting<T>`: a value that the user gave, or `auto`. Does not know who decides, or how.

/// An option that may be left to the system.
///
/// `Auto` means that the user wrote nothing, `auto` or `null`; a later stage chooses and gives its reason. A `Value` is
/// what the user wrote and is used or rejected, never replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Setting<T> {
    /// The choice is still open.
    #[default]
    Auto,
    /// The value that the user chose.
    Value(T),
}

impl<T> From<T> for Setting<T> {
    fn from(value: T) -> Self {
        Setting::Value(value)
    }
}

impl<T> Setting<T> {
    /// True if the user left the choice open.
    pub fn is_auto(&self) -> bool {
        matches!(self, Setting::Auto)
    }

    /// The value that the user gave, if any.
    pub fn value(&self) -> Option<&T> {
        match self {
            Setting::Auto => None,
            Setting::Value(value) => Some(value),
        }
    }

    /// The value that the user gave, else the result of `decide`.
    pub fn unwrap_or_else(self, decide: impl FnOnce() -> T) -> T {
        match self {
            Setting::Auto => decide(),
            Setting::Value(value) => value,
        }
    }
}
