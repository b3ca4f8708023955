//! The result of a run in the form that everybody reads: an adapter as PEFT writes it, or a model
//! as transformers does. It is loaded again and compared with the live model before it counts.

use std::path::Path;
use std::sync::Arc;

use compiler::CompileOptions;
use data::Batch;
use data::safetensors::{NamedTensor, write, write_folder};
use program::{Documents, EntryKind, Variant};
use serde_json::{Value, json};
use tensor::{DType, HostTensor};

use crate::engine::Engine;
use crate::error::{Result, TrainError};
use crate::model::Model;
use crate::peft;
use crate::source::ModelSource;
use crate::staged::write_synced;
use crate::trainer::Trainer;
use crate::weights::{self, Part};

/// Files of a model folder that are handed on as they are.
const HANDED_ON: &[&str] = &[
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// Largest file of a model.
const SHARD_BYTES: usize = 5_000_000_000;

/// Tokens of the row on which a result is compared with the live model.
const CHECKED_TOKENS: usize = 32;

impl Trainer {
    /// Writes the adapter, or without one the model, to a folder that then appears whole.
    ///
    /// A folder that this trainer wrote is replaced in one step. Errors: anything else that is there
    /// already, a full disk, and a result that does not give the live model's logits when it is loaded
    /// again.
    pub fn export(&mut self, folder: &Path) -> Result<()> {
        let staged = self.written.stage(folder)?;
        self.write_result(staged.path())?;
        self.check_result(staged.path())?;
        staged.commit(&mut self.written)
    }

    /// Writes adapter or model into an existing folder.
    pub(crate) fn write_result(&mut self, folder: &Path) -> Result<()> {
        let adapter = self.plan.compile.adapter.clone();
        let base = self.config.model.model.clone();
        let source = self.source.clone();
        let engine = self.engine()?;
        let program = engine.program().clone();
        let part = if adapter.is_some() { Part::Adapter } else { Part::Base };
        let mut tensors: Vec<(String, HostTensor)> = Vec::new();
        for slot in part.of(&program) {
            tensors.push((slot.name.clone(), weights::read(engine.session(), slot)?));
        }
        let named: Vec<NamedTensor<'_>> = tensors.iter().map(|(name, t)| NamedTensor::new(name.clone(), t)).collect();
        match adapter {
            Some(adapter) => {
                write(&folder.join("adapter_model.safetensors"), &named, &Default::default()).map_err(failed)?;
                let config = peft::config(&adapter, &program, &base);
                write_synced(&folder.join("adapter_config.json"), pretty(&config).as_bytes())
            }
            None => {
                write_folder(folder, &named, SHARD_BYTES).map_err(failed)?;
                let config = with_dtype(&source.config, self.plan.compile.weights);
                write_synced(&folder.join("config.json"), pretty(&config).as_bytes())?;
                hand_on(&source.folder, folder)
            }
        }
    }

    /// Loads what was written the way any user would, and compares logits with the live weights in
    /// the same program.
    fn check_result(&mut self, folder: &Path) -> Result<()> {
        let batch = check_batch(self.source.vocab_size()?);
        let dtype = self.plan.compile.weights;
        let (source, adapter) = match self.plan.compile.adapter {
            Some(_) if self.config.model.init == crate::config::Init::Pretrained => (self.source.clone(), Some(folder)),
            // The base of this adapter exists only in this run: there is nothing to load it onto.
            Some(_) => return Ok(()),
            None => (Arc::new(ModelSource { folder: folder.to_owned(), ..(*self.source).clone() }), None),
        };
        let mut loaded = Model::load(self.device.clone(), source, adapter, dtype)?;
        let found = loaded.forward(&batch, false)?.logits.to_f32();
        drop(loaded);
        let live = self.live_logits(&batch)?.to_f32();
        if !live.iter().all(|x| x.is_finite()) {
            let what = "the trained model's logits are not finite: nothing is exported".to_owned();
            return Err(TrainError::Diverged { what });
        }
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let difference = norm(&mut found.iter().zip(&live).map(|(f, l)| f - l)) / norm(&mut live.iter().copied());
        let allowed = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
        if difference <= allowed {
            return Ok(());
        }
        Err(TrainError::Failed(format!(
            "the exported result was loaded again and gives other logits than the live model: relative difference \
             {difference:.1e}, allowed {allowed:.0e}"
        )))
    }

    /// Logits of the live weights, in a program of their own without the training step's memory.
    fn live_logits(&mut self, batch: &Batch) -> Result<HostTensor> {
        let variant = Variant { batch: batch.batch, seq_len: batch.seq_len, documents: Documents::Rows };
        let options = CompileOptions {
            variants: vec![variant],
            training: None,
            evaluate: false,
            forward: true,
            outputs: vec!["logits".to_owned()],
            ..self.plan.compile.clone()
        };
        let mut copy = Engine::new(self.device.clone(), self.source.clone(), options)?;
        let engine = self.engine()?;
        let (from, to) = (engine.program().clone(), copy.program().clone());
        for slot in &from.parameters {
            let tensor = weights::read(engine.session(), slot)?;
            let place = to.parameter(&slot.name).expect("both programs are of one model");
            copy.session().write(&place.weight, &tensor.bytes)?;
        }
        copy.run(EntryKind::Forward, variant, batch)?;
        copy.output(EntryKind::Forward, variant, "logits")
    }
}

fn failed(error: data::DataError) -> TrainError {
    TrainError::Failed(error.to_string())
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).expect("a value is always representable as JSON") + "\n"
}

/// The model's configuration with the element type of the weights, in the spelling that it uses.
fn with_dtype(config: &Value, dtype: DType) -> Value {
    let mut config = config.clone();
    let name = match dtype {
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    let key = if config.get("torch_dtype").is_some() { "torch_dtype" } else { "dtype" };
    config[key] = json!(name);
    config
}

fn hand_on(from: &Path, to: &Path) -> Result<()> {
    for name in HANDED_ON {
        let source = from.join(name);
        if source.is_file() {
            std::fs::copy(&source, to.join(name)).map_err(|e| TrainError::io("copy", &source, e))?;
        }
    }
    Ok(())
}

/// A row of tokens spread over the vocabulary.
fn check_batch(vocabulary: usize) -> Batch {
    let id = |t: usize| (t.wrapping_mul(2_654_435_761) % vocabulary) as i32;
    let ids: Vec<i32> = (1..=CHECKED_TOKENS).map(id).collect();
    let labels = ids.clone();
    Batch::from_labels(1, CHECKED_TOKENS, ids, &labels, None, None).expect("a row of tokens")
}
