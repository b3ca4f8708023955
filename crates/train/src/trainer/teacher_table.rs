//! The likeliest tokens of the teacher for all documents of a run (`precompute_teacher`): computed before training and kept
//! on disk for later runs in the cache of encoded rows. They are known by what a document holds, so that any layout of
//! rows finds them. Knows no loss.

use std::io;
use std::ops::Range;

use data::{Batch, RecordWriter, Records, Stop, Taught};

use crate::error::{Result, TrainError, go_on};
use crate::input::encoded::row_cache;
use crate::plan::teacher::Teacher;
use crate::trainer::Trainer;
use crate::trainer::reference_table::{identity, targets};

/// The name of the record that says how much of the probability the tokens have.
const SHARE: [u8; 32] = [0; 32];

/// Bytes of a token with its log-probability.
const PAIR: usize = 8;

impl Trainer {
    /// Computes the likeliest tokens of the teacher, or takes them from the cache, before the weights of the training are on
    /// the device. `stop` is called before every batch. Returns the phase of the start, if the run wants them.
    pub(crate) fn precompute_teacher(&mut self, stop: Stop<'_>) -> Result<Option<&'static str>> {
        let Some(teacher) = self.plan.teacher.clone().filter(|_| self.config.distillation.precompute_teacher) else {
            return Ok(None);
        };
        if self.feed.is_none() {
            return Ok(None);
        }
        let usage = |text: &str| TrainError::Usage(format!("`precompute_teacher: true` {text}"));
        let cache = row_cache(&self.config, &mut Vec::new()).ok_or_else(|| {
            usage("keeps the teacher's tokens in the cache of encoded rows, and there is none: set `data_cache`")
        })?;
        let key = self.teacher_key(&teacher)?.ok_or_else(|| usage("needs a teacher whose weights are in files"))?;
        let (records, phase) = match cache.records(&key) {
            Some(records) => (records, "teacher, from the cache"),
            None => {
                let folder = cache.folder().display().to_string();
                let failed = |error: io::Error| {
                    TrainError::Failed(format!("{folder}: cannot write the teacher's tokens: {error}"))
                };
                let mut writer = cache.keep_records(&key).map_err(failed)?;
                let filled = self.fill_records(&teacher, &mut writer, &failed, stop);
                // The training takes its place.
                self.teacher = None;
                filled?;
                (writer.finish().map_err(failed)?, "teacher")
            }
        };
        if let Some(share) =
            records.get(&SHARE).ok().flatten().and_then(|bytes| Some(f64::from_le_bytes(bytes.try_into().ok()?)))
        {
            let count = self.config.distillation.loss_top_k;
            eprintln!("surogate: {count} tokens have {:.2} % of the teacher's probability, on average", 100.0 * share);
        }
        self.taught = Some(records);
        Ok(Some(phase))
    }

    /// The distributions of the teacher for a round, whose documents are known. Errors: a batch of the caller's.
    pub(crate) fn known_distributions(&self, round: &[Batch]) -> Result<Vec<Taught>> {
        let count = self.config.distillation.loss_top_k as usize;
        let records = self.taught.as_ref();
        round.iter().map(|batch| records.map_or(Ok(None), |of| known(of, batch, count))?.ok_or_else(unknown)).collect()
    }

    /// The key of the records in the cache: weights, documents, their layout in rows, and the arithmetic.
    fn teacher_key(&self, teacher: &Teacher) -> Result<Option<String>> {
        let Some(digest) = teacher.source.digest(true)?.weights else { return Ok(None) };
        let (feed, compile) = (self.feed.as_ref().expect("a run with data has a feed"), &self.plan.compile);
        Ok(Some(format!(
            "likeliest tokens of the teacher, {}\n{digest}\n{:?}\n{}\n{:?}\n{:?}\n{:?}\n{:?}",
            env!("CARGO_PKG_VERSION"),
            teacher.source.config.0,
            feed.layout(),
            self.config.recorded_of_teacher(),
            teacher.options(compile),
            self.device.arithmetic,
            self.config.replicas(),
        )))
    }

    fn fill_records(
        &mut self,
        teacher: &Teacher,
        writer: &mut RecordWriter,
        failed: &impl Fn(io::Error) -> TrainError,
        stop: Stop<'_>,
    ) -> Result<()> {
        let feed = self.feed.as_ref().expect("a run with data has a feed");
        let (loaders, one_per_row, replicas) = (feed.once()?, feed.one_per_row, self.config.replicas());
        let count = self.config.distillation.loss_top_k as usize;
        let (mut share, mut tokens) = (0.0, 0usize);
        for mut loader in loaders {
            loop {
                go_on(stop)?;
                let round = loader.by_ref().take(replicas).collect::<std::result::Result<Vec<Batch>, _>>();
                let round = round.map_err(TrainError::Data)?;
                if round.is_empty() {
                    break;
                }
                let engine = self.teacher_engine(teacher, crate::engine::variant_of(&round, one_per_row))?;
                let distributions = teacher.distributions(engine, &round, one_per_row)?;
                for (batch, of) in round.iter().zip(&distributions) {
                    for document in documents(batch) {
                        let mut record = Vec::new();
                        for at in targets(batch, document.clone()) {
                            let pairs = at * count..(at + 1) * count;
                            let (ids, logps) = (&of.ids[pairs.clone()], &of.logps[pairs]);
                            record.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
                            record.extend(logps.iter().flat_map(|logp| logp.to_le_bytes()));
                            share += logps.iter().map(|logp| f64::from(*logp).exp()).sum::<f64>();
                            tokens += 1;
                        }
                        writer.add(&identity(batch, document), &record).map_err(failed)?;
                    }
                }
            }
        }
        writer.add(&SHARE, &(share / tokens.max(1) as f64).to_le_bytes()).map_err(failed)
    }
}

/// The distributions of a batch, [B, T, count], and -1 where there is no target; none if one of its documents is not known.
fn known(records: &Records, batch: &Batch, count: usize) -> Result<Option<Taught>> {
    let size = batch.targets.len() * count;
    let mut taught = Taught { logits: Vec::new(), ids: vec![-1; size], logps: vec![0.0; size] };
    for document in documents(batch) {
        let failed = |error| TrainError::Failed(format!("the kept tokens of the teacher cannot be read: {error}"));
        let Some(record) = records.get(&identity(batch, document.clone())).map_err(failed)? else { return Ok(None) };
        for (at, target) in targets(batch, document).zip(record.chunks_exact(count * PAIR)) {
            let (ids, logps) = target.split_at(count * PAIR / 2);
            let number = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).expect("four bytes");
            for (i, (id, logp)) in ids.chunks_exact(4).zip(logps.chunks_exact(4)).enumerate() {
                taught.ids[at * count + i] = i32::from_le_bytes(number(id));
                taught.logps[at * count + i] = f32::from_le_bytes(number(logp));
            }
        }
    }
    Ok(Some(taught))
}

/// The documents of a batch, as ranges of its vectors.
fn documents(batch: &Batch) -> Vec<Range<usize>> {
    let mut documents: Vec<Range<usize>> = Vec::new();
    for at in (0..batch.input_ids.len()).filter(|at| batch.present[*at] != 0.0) {
        let start = at - at % batch.seq_len + batch.document_start[at] as usize;
        match documents.last_mut().filter(|last| last.start == start) {
            Some(last) => last.end = at + 1,
            None => documents.push(start..at + 1),
        }
    }
    documents
}

fn unknown() -> TrainError {
    let text = "`precompute_teacher` knows the documents of the run's data, and the batch has others: give `teacher_topk_ids` \
                and `teacher_topk_logps` with it, or set `precompute_teacher: false`";
    TrainError::Usage(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_end_where_others_and_padding_begin() {
        let positions = vec![0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 4, 5];
        let batch = Batch::from_labels(2, 6, vec![7; 12], &[7; 12], Some(positions), None).unwrap();
        assert_eq!(documents(&batch), [0..3, 3..5, 5..6, 6..12]);
        assert_eq!(documents(&batch.padded_from(&[5, 2])), [0..3, 3..5, 6..8]);
    }
}
