//! The weights of a trainer, lent to a model in evaluation mode and to what generates text: one session, whose program is
//! exchanged. The trainer takes it back, as it was, before anything of its own runs.

use std::sync::Arc;

use compiler::CompileOptions;
use data::image::PixelLimits;

use crate::engine::{in_evaluation, in_place};
use crate::error::{Result, TrainError};
use crate::inference::generate::{Defaults, Generator, PromptEncoder};
use crate::inference::model::Model;
use crate::input::conversation::dialogue_options;
use crate::model::source::ModelSource;
use crate::trainer::Trainer;
use crate::trainer::lent::Live;

const LENT: &str = "the weights were lent, and who borrows keeps them";

impl Trainer {
    /// Calls the model in training, in evaluation mode. What was being generated is over.
    pub fn with_model<T>(&mut self, call: impl FnOnce(&mut Model) -> Result<T>) -> Result<T> {
        let live = self.lend()?;
        live.gather()?;
        call(&mut live.model)
    }

    /// Calls what generates text with the weights in training.
    pub fn with_generator<T>(&mut self, call: impl FnOnce(&mut Generator) -> Result<T>) -> Result<T> {
        self.lend()?;
        let live = self.live.as_ref().expect(LENT);
        let made = if live.generator.is_none() { Some(self.generator(live.options.clone())?) } else { None };
        let Live { model, generator, .. } = self.live.as_mut().expect(LENT);
        let generator = match made {
            Some(made) => generator.insert(made),
            None => generator.as_mut().expect("it was made before"),
        };
        if !generator.is_loaded() {
            generator.take(model.release().expect(LENT))?;
        }
        call(generator)
    }

    /// Lends the compiled model, which is made when there is none yet.
    fn lend(&mut self) -> Result<&mut Live> {
        if self.live.as_ref().is_none_or(|live| live.training.is_none()) {
            if self.config.sequence() > 1 || self.config.stages() > 1 {
                let option = if self.config.stages() > 1 { "pipeline_parallel_size" } else { "sequence_parallel_size" };
                let text =
                    format!("`{option}`: a device has a part of each row or of the layers: there is no live model");
                return Err(TrainError::Usage(text));
            }
            let options = self.plan.compile.clone();
            let engine = self.engine()?;
            let options = in_place(in_evaluation(options, engine.program()), engine.program());
            let training = engine.compiled();
            let (device, source) = (self.device.clone(), self.source_with_bounds());
            let engine = self.engine.take().expect("just seen");
            let live = self.live.get_or_insert_with(|| Live {
                model: Model::of(device, source, None, options.clone()),
                options,
                generator: None,
                training: None,
            });
            live.training = Some(training);
            live.model.take(engine)?;
        }
        Ok(self.live.as_mut().expect("just lent"))
    }

    /// The source of the model, whose images have the bounds of the run.
    fn source_with_bounds(&self) -> Arc<ModelSource> {
        let of = &self.config.template;
        let pixels = PixelLimits { least: of.min_pixels, most: of.max_pixels };
        if pixels == PixelLimits::default() || self.source.model.images.is_none() {
            return self.source.clone();
        }
        Arc::new(ModelSource { pixels, ..(*self.source).clone() })
    }

    fn generator(&self, options: CompileOptions) -> Result<Generator> {
        let (source, config) = (self.source_with_bounds(), &self.config);
        let encoder = PromptEncoder::open(&[&source.folder])?;
        let (dialogue, _) = dialogue_options(config, &source, encoder.tokenizer().map(|of| &**of))?;
        let encoder = encoder.with_template(dialogue.template)?;
        let defaults = Defaults::read(&source.folder, &source.config.0)?;
        Ok(Generator::of(self.device.clone(), source, None, options, encoder, defaults))
    }

    /// Takes back what was lent, as it was.
    pub(crate) fn take_back(&mut self) -> Result<()> {
        let Some(live) = &mut self.live else { return Ok(()) };
        let Some(training) = live.training.take() else { return Ok(()) };
        live.gather()?;
        let engine = live.model.release().expect(LENT);
        self.engine.insert(engine).resume(training)
    }
}
