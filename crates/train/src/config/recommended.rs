//! Values that were chosen for options which the user left out. Which ones are best is decided elsewhere.

use options::Setting;
use serde_json::Value;

use super::{Config, Reasons, Recipe};

/// Puts a value where the option has it; `None` for a value that it cannot have.
type Put = fn(&mut Config, &Value) -> Option<()>;

/// Options that may be chosen for the user.
const OPTIONS: &[(&str, Put)] = &[
    ("per_device_train_batch_size", |config, value| number(&mut config.training.per_device_train_batch_size, value)),
    ("gradient_accumulation_steps", |config, value| number(&mut config.training.gradient_accumulation_steps, value)),
    ("sequence_parallel_size", |config, value| number(&mut config.template.sequence_parallel_size, value)),
    ("recipe", |config, value| {
        config.precision.recipe = *Recipe::ALL.iter().find(|recipe| value == recipe.name())?;
        Some(())
    }),
    ("qlora_bnb", |config, value| {
        config.qlora.qlora_bnb = value.as_bool()?;
        Some(())
    }),
    ("skip_quant_last_layers", |config, value| number(&mut config.precision.skip_quant_last_layers, value)),
    ("sample_packing", |config, value| {
        config.data.sample_packing = value.as_bool()?;
        Some(())
    }),
    ("offload_optimizer", |config, value| {
        config.offload.offload_optimizer = Setting::Value(value.as_bool()?);
        Some(())
    }),
    ("offload_master", |config, value| {
        config.offload.offload_master = Setting::Value(value.as_bool()?);
        Some(())
    }),
];

fn number(at: &mut u32, value: &Value) -> Option<()> {
    *at = u32::try_from(value.as_u64()?).ok().filter(|number| *number > 0)?;
    Some(())
}

impl Config {
    /// The same configuration with values for options that were left out. What the user wrote stays, and so does an
    /// option for which the value means nothing to this version.
    pub fn with_recommended(&self, values: Reasons) -> Config {
        let mut config = self.clone();
        let mut taken = Reasons::new();
        for (name, reason) in values {
            let put = OPTIONS.iter().find(|(known, _)| *known == name).map(|(_, put)| put);
            if !self.is_written(&name) && put.is_some_and(|put| put(&mut config, &reason.value).is_some()) {
                taken.insert(name, reason);
            }
        }
        config.recommended = Some(taken);
        config
    }

    /// The recommended values with their reasons, a line for each reason.
    pub fn recommendations(&self) -> Vec<String> {
        let mut by_reason: Vec<(&str, String)> = Vec::new();
        for (name, of) in self.recommended.iter().flatten() {
            let value = of.value.as_str().map_or_else(|| of.value.to_string(), str::to_owned);
            match by_reason.iter_mut().find(|(because, _)| *because == of.because) {
                Some((_, options)) => *options += &format!(", {name}: {value}"),
                None => by_reason.push((&of.because, format!("{name}: {value}"))),
            }
        }
        by_reason.iter().map(|(because, options)| format!("Recommended: {options} ({because})")).collect()
    }
}
