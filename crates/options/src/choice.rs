//! Enumerations as options: `choices!` defines a Rust enum whose words, aliases and doc comments are data.

/// Declares an enum that an option can have as its type.
///
/// ```
/// options::choices! {
///     /// Shape of the curve.
///     pub enum Curve {
///         /// Straight.
///         Linear = "linear" | "straight",
///         /// Half a period.
///         Cosine = "cosine",
///     }
/// }
/// assert_eq!(Curve::Linear.name(), "linear");
/// assert_eq!(Curve::parse("straight"), Some(Curve::Linear));
/// ```
#[macro_export]
macro_rules! choices {
    (
        $(#[doc = $about:literal])+
        $vis:vis enum $name:ident {
            $( $(#[doc = $doc:literal])+ $variant:ident = $word:literal $(| $alias:literal)* ),+ $(,)?
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name {
            $( $(#[doc = $doc])+ $variant, )+
        }

        impl $name {
            /// Every value, with its words.
            pub const CHOICES: &'static [$crate::Choice] = &[
                $( $crate::Choice { name: $word, aliases: &[$($alias),*], doc: &[$($doc),+] }, )+
            ];

            /// Every value, in the order of the declaration.
            pub const ALL: &'static [$name] = &[$( $name::$variant ),+];

            /// Returns the canonical word of a value.
            pub const fn name(self) -> &'static str {
                match self { $( $name::$variant => $word, )+ }
            }

            /// Returns the value of a word or of one of its other spellings.
            pub fn parse(word: &str) -> Option<$name> {
                match word {
                    $( $word $(| $alias)* => Some($name::$variant), )+
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str(self.name())
            }
        }

        impl $crate::OptionValue for $name {
            const KIND: $crate::Kind = $crate::Kind::Choice($name::CHOICES);

            fn read(node: &$crate::Node, _: &mut $crate::Reader) -> Result<Self, $crate::Fault> {
                let word = node.word()?;
                $name::parse(word).ok_or_else(|| {
                    let words = $name::CHOICES.iter().flat_map(|choice| {
                        std::iter::once(choice.name).chain(choice.aliases.iter().copied())
                    });
                    let hint = $crate::nearest(word, words).map(|near| format!("did you mean `{near}`?"));
                    $crate::Fault::Mismatch { hint }
                })
            }

            fn write(&self) -> $crate::serde_json::Value {
                $crate::serde_json::Value::String(self.name().to_string())
            }

            fn placeholder() -> Self {
                $name::ALL[0]
            }
        }
    };
}
