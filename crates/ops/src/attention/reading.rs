//! The attributes of an attention call.

use tensor::Attrs;

use crate::invariance::BATCH_INVARIANT;

/// The attributes of a call, read.
#[derive(Clone, Copy)]
pub struct Reading {
    pub scale: f64,
    pub window: Option<usize>,
    pub soft_cap: Option<f64>,
    pub bidirectional: bool,
    /// Rows hold branches after common beginnings: the input that limits what is seen is `last_query`.
    pub branches: bool,
}

impl Reading {
    pub fn of(attrs: &Attrs, head_dim: usize) -> Result<Self, String> {
        let scale = attrs.optional_float("scale")?.unwrap_or(1.0 / (head_dim as f64).sqrt());
        let window = match attrs.optional_int("window")? {
            None => None,
            Some(window) if window > 0 => Some(window as usize),
            Some(window) => return Err(format!("`window` is {window}, expected 1 or more")),
        };
        let soft_cap = attrs.optional_float("soft_cap")?;
        if let Some(cap) = soft_cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(format!("`soft_cap` is {cap}, expected more than 0"));
        }
        attrs.flag(BATCH_INVARIANT)?;
        let (bidirectional, branches) = (attrs.flag("bidirectional")?, attrs.flag("branches")?);
        if branches && (bidirectional || window.is_some()) {
            return Err(
                "`branches` are causal and without a window: their tokens lie apart from what they follow".into()
            );
        }
        Ok(Reading { scale, window, soft_cap, bidirectional, branches })
    }

    pub fn checked(attrs: &Attrs, head_dim: usize) -> Self {
        Self::of(attrs, head_dim).expect("checked by the shape rule")
    }

    /// The window, where it hides a key of a row.
    pub fn hiding_window(&self, tokens: usize) -> Option<usize> {
        self.window.filter(|window| *window < tokens)
    }
}
