//! Log-probabilities of the reference that are computed before training (`precompute_ref_log_probs`), or taken from the cache.

use data::{Batch, Stop};

use crate::error::{Result, TrainError};
use crate::input::encoded::row_cache;
use crate::plan::reference::{self, Reference};
use crate::trainer::Trainer;
use crate::trainer::reference_table::ReferenceTable;

impl Trainer {
    /// Computes the log-probabilities of a reference with weights of its own, which leave the device again before those of
    /// the training come. `stop` is called before every batch. Returns the phase of the start, if there is such a reference.
    pub(crate) fn precompute_reference(&mut self, stop: Stop<'_>) -> Result<Option<&'static str>> {
        let has_weights = matches!(self.plan.reference, Some(Reference::Folder(_)));
        if !self.config.preferences.precompute_ref_log_probs || !has_weights || self.feed.is_none() {
            return Ok(None);
        }
        let phase = self.read_or_fill_table(stop)?;
        self.reference = None;
        Ok(Some(phase))
    }

    /// The log-probabilities of the reference of micro-batches whose documents are in the table. Errors: a batch of the
    /// caller's.
    pub(crate) fn known_logps(&mut self, batches: &[Batch]) -> Result<Vec<Vec<f32>>> {
        if self.reference_table.is_none() && self.feed.is_some() {
            let phase = self.read_or_fill_table(&|| false)?;
            self.startup_phase(phase);
        }
        let known = |batch| self.reference_table.as_ref().and_then(|table| table.of(batch));
        batches.iter().map(known).collect::<Option<Vec<_>>>().ok_or_else(|| {
            let text = "`precompute_ref_log_probs` knows the documents of the run's data, and the batch has others: give \
                        `reference_logps` with it, or set `precompute_ref_log_probs: false`";
            TrainError::Usage(text.to_owned())
        })
    }

    /// Takes the table of an earlier run of the same reference over the same rows, or computes it and keeps it. Returns the
    /// phase of the start.
    fn read_or_fill_table(&mut self, stop: Stop<'_>) -> Result<&'static str> {
        let cache = row_cache(&self.config, &mut Vec::new());
        let keeping = cache.zip(self.table_key()?);
        if let Some(bytes) = keeping.as_ref().and_then(|(cache, key)| cache.values(key))
            && let Ok(table) = serde_json::from_slice(&bytes)
        {
            self.reference_table = Some(table);
            return Ok("reference, from the cache");
        }
        self.fill_table(stop)?;
        if let Some((cache, key)) = keeping {
            let table = serde_json::to_vec(&self.reference_table).expect("a table has strings and numbers");
            if let Err(error) = cache.keep_values(&key, &table) {
                let folder = cache.folder().display();
                eprintln!("surogate: {folder}: {error}: log-probabilities of the reference are kept in memory alone");
            }
        }
        Ok("reference")
    }

    /// The key of the table in the cache: weights, documents, their layout in rows, and the arithmetic. None where the weights
    /// are in no file.
    fn table_key(&mut self) -> Result<Option<String>> {
        let weights = match self.plan.reference.clone().expect("a run with a reference") {
            Reference::WithoutAdapter => self.model_digest()?.clone(),
            Reference::Folder(folder) if folder == self.source.folder => self.model_digest()?.clone(),
            Reference::Folder(folder) => reference::source_of(&folder, &self.source)?.digest(true)?,
        };
        let Some(digest) = weights.weights else { return Ok(None) };
        let (feed, compile) = (self.feed.as_ref().expect("a run with data has a feed"), &self.plan.compile);
        let options = reference::options(compile, self.config.scoring());
        let is_own = self.plan.reference == Some(Reference::WithoutAdapter);
        let quantised = is_own.then_some((&compile.quantised, &compile.stored));
        let config = &self.source.config.0;
        Ok(Some(format!(
            "log-probabilities of the reference, {}\n{digest}\n{config:?}\n{}\n{:?}\n{options:?}\n{quantised:?}\n{:?}",
            env!("CARGO_PKG_VERSION"),
            feed.layout(),
            self.device.arithmetic,
            self.config.replicas(),
        )))
    }

    fn fill_table(&mut self, stop: Stop<'_>) -> Result<()> {
        let feed = self.feed.as_ref().expect("a run with data has a feed");
        let (loaders, one_per_row) = (feed.once()?, feed.one_per_row);
        let reference = self.plan.reference.clone().expect("a run with a reference");
        let (mut table, replicas) = (ReferenceTable::default(), self.config.replicas());
        for mut loader in loaders {
            loop {
                if stop() {
                    return Err(TrainError::Stopped);
                }
                let round = loader.by_ref().take(replicas).collect::<std::result::Result<Vec<_>, _>>();
                let round: Vec<Batch> = round.map_err(TrainError::Data)?;
                if round.is_empty() {
                    break;
                }
                let losses = self.reference_losses(&reference, &round, one_per_row)?;
                for (batch, losses) in round.iter().zip(losses) {
                    table.add(batch, &losses.into_iter().map(|loss| -loss).collect::<Vec<_>>());
                }
            }
        }
        self.reference_table = Some(table);
        Ok(())
    }
}
