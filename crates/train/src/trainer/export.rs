//! The result of a run in standard formats: an adapter in PEFT format, or a model in transformers format. It is read
//! back and compared with the live model before it counts: tensor by tensor (`artifacts/recheck.rs`), and, where a second model
//! is cheap, by its logits.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compiler::{AdapterRules, CompileOptions, EntryOptions, Recipe, Sharding};
use data::{Batch, Stop};
use program::{Choices, Documents, EntryKind, ParameterSlot, Variant};
use tensor::{DType, HostTensor};

use crate::artifacts::card::{Form, base_name};
use crate::artifacts::recheck::Live;
use crate::config::Init;
use crate::engine::Engine;
use crate::engine::weights;
use crate::error::{Result, TrainError, go_on};
use crate::files::staged::Staged;
use crate::inference::generate::{is_of_conversations, write_end_tokens};
use crate::inference::model::Model;
use crate::input::images;
use crate::model::adapted::{self, Pairs};
use crate::model::folder::{write_files, write_weights};
use crate::model::peft;
use crate::model::rounding::Rounding;
use crate::model::source::ModelSource;
use crate::model::weight_set::WeightSet;
use crate::trainer::Trainer;
use crate::trainer::card;
use crate::trainer::trained::{Contents, Trained};

/// Tokens of the row on which a result is compared with the live model, at most.
const CHECKED_TOKENS: usize = 32;

/// Bytes up to which a model is also loaded a second time, and its logits are compared.
const LOADED_AGAIN: usize = 1 << 30;

impl Trainer {
    /// Writes the adapter, or without one the model, to a folder that then appears whole.
    ///
    /// A folder that this trainer wrote is replaced in one step. Errors: anything else that is there
    /// already, a full disk, and a result that does not give the live model's logits when it is loaded
    /// again.
    pub fn export(&mut self, folder: &Path) -> Result<()> {
        let staged = self.stage_export(folder, &|| false)?;
        staged.commit(&mut self.written)
    }

    /// Writes and checks a result that appears when it is committed. Asked to stop, it leaves nothing.
    pub(crate) fn stage_export(&mut self, folder: &Path, stop: Stop<'_>) -> Result<Staged> {
        let staged = Staged::begin(&self.written, folder)?;
        self.write_result(staged.path(), stop)?;
        self.rounding = self.rounding_of_masters()?;
        let is_model = self.plan.compile.adapter.is_none();
        self.check_result(staged.path(), is_model, stop)?;
        Ok(staged)
    }

    /// Returns how far the result that was written last is rounded, if it is; `merged`: a model with the adapter added.
    pub fn rounding_note(&self, merged: bool) -> Option<String> {
        let compile = &self.plan.compile;
        let adapter = compile.adapter.as_ref().filter(|_| !merged);
        self.rounding.text(adapter.map_or(compile.weights, |adapter| adapter.dtype).name())
    }

    /// Writes the model with the adapter added to its weights, in f32 and rounded once to their type; otherwise as
    /// [`Trainer::export`]. Without an adapter the two are the same.
    pub fn export_merged(&mut self, folder: &Path) -> Result<()> {
        let staged = self.stage_merged(folder, &|| false)?;
        staged.commit(&mut self.written)
    }

    /// Stages a result as [`Trainer::stage_export`] does, with the adapter added to the model.
    pub(crate) fn stage_merged(&mut self, folder: &Path, stop: Stop<'_>) -> Result<Staged> {
        let staged = Staged::begin(&self.written, folder)?;
        self.write_model(staged.path(), stop)?;
        self.check_result(staged.path(), true, stop)?;
        Ok(staged)
    }

    /// Writes adapter or model into an existing folder.
    fn write_result(&mut self, folder: &Path, stop: Stop<'_>) -> Result<()> {
        if self.plan.compile.adapter.is_none() {
            return self.write_model(folder, stop);
        }
        let trained = self.trained()?;
        let engine = self.engine()?;
        trained.write(folder, &mut |at| {
            go_on(stop)?;
            engine.tensor(at)
        })?;
        card::write(self, Form::Adapter, folder)
    }

    /// The trained parameters, apart from the session that holds them.
    pub(crate) fn trained(&mut self) -> Result<Trained> {
        let adapter = self.plan.compile.adapter.clone();
        let base = base_name(&self.config.model.model);
        let (source, dtype) = (self.source.clone(), self.plan.compile.weights);
        let (template, conversations) = (self.template(), is_of_conversations(&self.config));
        let began = self.config.lora.adapter.as_ref().map(PathBuf::from);
        let program = self.engine()?.program().clone();
        Ok(Trained { program, adapter, began, base, source, dtype, template, conversations })
    }

    /// Writes the weights, adapters added, one after the other, and what else belongs to a model.
    fn write_model(&mut self, folder: &Path, stop: Stop<'_>) -> Result<()> {
        let rules = self.plan.compile.adapter.as_ref().map(AdapterRules::new).transpose()?;
        let (source, dtype) = (self.source.clone(), self.plan.compile.weights);
        let engine = self.engine()?;
        let program = engine.program().clone();
        let contents = Contents::new(&source, &program)?;
        let (mut pairs, mut rounding) = (Pairs::default(), Rounding::default());
        let mut bytes_of = |slot: &ParameterSlot| -> Result<Vec<u8>> {
            let weight = weights::read(engine, slot)?;
            let of = rules.as_ref().map(|rules| peft::adapter_of(&program, rules, slot)).transpose()?.flatten();
            let Some(of) = of else { return Ok(weight.bytes) };
            let [a, b] = peft::matrices_of(&program, &of);
            let read = |which: &str| weights::read(engine, if which == "lora_A" { a } else { b });
            let pair = pairs.of(&of.module, read)?;
            let magnitude = peft::magnitude_of(&program, &slot.name);
            let magnitude = magnitude.map(|slot| weights::read(engine, slot)).transpose()?;
            Ok(adapted::added(&weight, &of, pair, magnitude.as_ref(), slot.transposed, &mut rounding).bytes)
        };
        write_weights(folder, contents.infos.clone(), |tensor| {
            go_on(stop)?;
            contents.bytes(tensor, &mut bytes_of)
        })?;
        self.rounding = rounding;
        write_files(&source.config, dtype, &source.folder, self.template().as_deref(), folder)?;
        write_end_tokens(folder, &source.config, is_of_conversations(&self.config))?;
        card::write(self, if self.plan.compile.adapter.is_some() { Form::Merged } else { Form::Model }, folder)
    }

    /// The largest distance of a result's weights from the optimizer's f32 master copies, if it keeps such.
    fn rounding_of_masters(&mut self) -> Result<Rounding> {
        let part = if self.plan.compile.adapter.is_some() { WeightSet::Adapter } else { WeightSet::Base };
        let engine = self.engine()?;
        let program = engine.program().clone();
        let mut rounding = Rounding::default();
        for slot in part.of(&program) {
            if let Some(master) = &slot.master {
                rounding.add(&engine.tensor(master)?.to_f32(), &engine.tensor(&slot.weight)?.to_f32());
            }
        }
        Ok(rounding)
    }

    /// The chat template that the data were written with, where it is not the model's own.
    fn template(&self) -> Option<String> {
        self.feed.as_ref().and_then(|feed| feed.encoded.template.clone())
    }

    /// Reads what was written and compares it with the live model.
    fn check_result(&mut self, folder: &Path, is_model: bool, stop: Stop<'_>) -> Result<()> {
        let rules = self.plan.compile.adapter.as_ref().map(AdapterRules::new).transpose()?;
        let (source, dtype) = (self.source.clone(), self.plan.compile.weights);
        let engine = self.engine()?;
        let program = engine.program().clone();
        let mut live = Live { engine, program: &program, rules: rules.as_ref(), stop };
        match is_model {
            true => live.compare_model(&source, dtype, folder)?,
            false => live.compare_adapter(folder, &source)?,
        }
        let bytes: usize = WeightSet::Base.of(&program).map(|slot| slot.elements() * slot.dtype().size()).sum();
        if bytes <= LOADED_AGAIN { self.check_logits(folder, is_model) } else { Ok(()) }
    }

    /// Loads what was written the way any user would, and compares logits with the live weights in
    /// the same program.
    fn check_logits(&mut self, folder: &Path, is_model: bool) -> Result<()> {
        let length = self.source.max_positions().unwrap_or(CHECKED_TOKENS).min(CHECKED_TOKENS);
        let batch = images::check_batch(&self.source, check_batch(self.source.vocab_size()?, length))?;
        let dtype = self.plan.compile.weights;
        let (source, adapter) = match is_model {
            true => (Arc::new(ModelSource { folder: folder.to_owned(), ..(*self.source).clone() }), None),
            false if self.config.model.init == Init::Pretrained => (self.source.clone(), Some(folder)),
            // The base of this adapter exists only in this run: there is nothing to load it onto.
            false => return Ok(()),
        };
        let loaded = Model::load(self.device.clone(), source, adapter, dtype)?;
        // An adapter is one of the quantised base; merged weights are what they are.
        let quantised = self.plan.compile.quantised.filter(|_| !is_model);
        let mut loaded = loaded.quantised(quantised);
        let found = loaded.forward(&batch, false)?.logits.to_f32();
        drop(loaded);
        let live = self.live_logits(&batch)?.to_f32();
        if !live.iter().all(|x| x.is_finite()) {
            let what = "the trained model's logits are not finite: nothing is exported".to_owned();
            return Err(TrainError::Diverged { what });
        }
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let difference = norm(&mut found.iter().zip(&live).map(|(f, l)| f - l)) / norm(&mut live.iter().copied());
        // Merging rounds the sums of weights and adapters: 6e-3 in bf16 for a model of 135 million parameters.
        let merged = is_model && self.plan.compile.adapter.is_some();
        let allowed = match (dtype, merged) {
            (DType::F32, false) => 1e-5,
            (DType::F32, true) => 1e-4,
            (_, false) => 1e-2,
            (_, true) => 5e-2,
        };
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
        let (rows, seq_len, patches) = (batch.batch, batch.seq_len, batch.patches.count());
        let variant = Variant { batch: rows, seq_len, documents: Documents::Rows, patches, logits: 0 };
        let options = CompileOptions {
            variants: vec![variant],
            training: None,
            // The function of the weights that are written, whatever they are multiplied with in training.
            recipe: Recipe::Uniform,
            entries: vec![EntryOptions::forward().keeping(["logits"])],
            sharding: Sharding::default(),
            branches: None,
            ..self.plan.compile.clone()
        };
        let mut copy = Engine::new(self.device.clone(), self.source.clone(), options, &Choices::new())?;
        let engine = self.engine()?;
        let (from, to) = (engine.program().clone(), copy.program().clone());
        for slot in &from.layout.parameters {
            let tensor = weights::read_stored(engine, slot)?;
            let place = to.parameter(&slot.name).expect("both programs are of one model");
            copy.session().write(&place.weight, &tensor.bytes)?;
        }
        copy.weights_written()?;
        copy.run(EntryKind::Forward, variant, std::slice::from_ref(batch))?;
        copy.output(EntryKind::Forward, variant, "logits")
    }
}

/// A row of tokens spread over the vocabulary.
fn check_batch(vocabulary: usize, length: usize) -> Batch {
    let id = |t: usize| (t.wrapping_mul(2_654_435_761) % vocabulary) as i32;
    let ids: Vec<i32> = (1..=length).map(id).collect();
    let labels = ids.clone();
    Batch::from_labels(1, length, ids, &labels, None, None).expect("a row of tokens")
}
