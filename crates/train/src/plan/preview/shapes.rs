//! The shapes of a run's batches and how many there will be: from its data as the run itself takes them, or assumed
//! where the data are not available.

use data::Purpose;
use program::{Documents, OfPatch, Seen, Variant};

use crate::config::Config;
use crate::error::Result;
use crate::input::encoded::Encoded;
use crate::input::feed::{Feed, fixed_lengths};
use crate::model::source::ModelSource;
use crate::plan::Plan;
use crate::plan::milestones::Milestones;
use crate::plan::reference::passes;
use crate::plan::sampled_shapes::shared_shape;

/// Tokens of a prompt to which answers are sampled, until the data are read.
const PROMPT: usize = 512;

/// Tokens of a prompt and of an answer to it that are estimated with.
pub(super) fn prompt_and_answer(config: &Config, sequence_len: usize) -> (usize, usize) {
    let answer = (config.reinforcement.max_completion_length as usize).min(sequence_len.saturating_sub(1));
    (PROMPT.min(sequence_len - answer).max(1), answer)
}

/// Documents of a packed row that are estimated with where the data are not known.
const DOCUMENTS_PER_ROW: usize = 16;
/// Patches of an image of which nothing is known: one megapixel in patches of 16 × 16.
const ASSUMED_IMAGE: usize = 4096;

/// Micro-batches of more tokens than these fit on no machine, and are not made to look at them.
const MOST_TOKENS: usize = 1 << 25;

/// The batch shapes that a plan assumes.
#[derive(Clone, Debug, PartialEq)]
pub struct Shapes {
    /// The compiled shapes, in the run's order.
    pub variants: Vec<Variant>,
    /// The share of each variant among all micro-batches.
    pub shares: Vec<f64>,
    /// Tokens of documents in a micro-batch, in the mean.
    pub tokens: f64,
    /// The share of a row that attention sees, given its documents.
    pub seen: Seen,
    /// Forward passes of a reference or of the policy before each micro-step, in the mean.
    pub passes: f64,
    /// Optimizer steps, where they are known.
    pub steps: Option<u64>,
    /// Number of evaluations of the held-out data, and their batches.
    pub evaluations: (u64, u64),
    /// The notes on a run of few steps, and on logits that are not computed.
    pub notes: Vec<String>,
    /// The assumptions, because the data are not available; a sentence.
    pub assumed: Option<String>,
}

impl Shapes {
    pub fn new(config: &Config, plan: &Plan, source: &ModelSource, data: Option<&Encoded>) -> Result<Shapes> {
        let rows = config.micro_rows() as usize;
        let is_small = rows.saturating_mul(plan.sequence_len) <= MOST_TOKENS;
        match data.filter(|encoded| is_small && encoded.longest() <= plan.sequence_len) {
            Some(encoded) => Shapes::of_data(config, plan, encoded),
            None => Ok(Shapes::assumed(config, plan, source)),
        }
    }

    /// Exactly those of the run.
    fn of_data(config: &Config, plan: &Plan, encoded: &Encoded) -> Result<Shapes> {
        Shapes::of_feed(config, plan, &Feed::new(config, encoded.clone(), plan.rows_of_feed(), &|| false)?)
    }

    /// The shapes of data that are laid out in rows.
    pub(crate) fn of_feed(config: &Config, plan: &Plan, feed: &Feed) -> Result<Shapes> {
        let variants = feed.variants();
        let seen = feed.first_shapes()?;
        let extents = |of: &Variant| (of.seq_len, of.patches, of.logits);
        let count = |variant: &Variant| seen.extents.iter().filter(|of| **of == extents(variant)).count();
        // Batches of shapes that are compiled when they come are taken for the others.
        let all = variants.iter().map(count).sum::<usize>().max(1) as f64;
        let shares = variants.iter().map(|variant| count(variant) as f64 / all).collect();
        let steps = feed.total_steps(config);
        let of_steps = Milestones::new(config, feed, steps)?.count_of_evaluations(steps);
        let evaluations = (of_steps, feed.validation_batches()?);
        let whole = variants.iter().all(|variant| variant.documents == Documents::Rows);
        let (tokens, seen) =
            (seen.tokens, Seen { documents: if whole { 1.0 } else { seen.seen }, patches: seen.patches });
        let notes = feed.note_on_steps(config).into_iter().chain(feed.note_on_logits()).collect();
        let passes = passes(config, plan.reference.as_ref());
        Ok(Shapes { variants, shares, tokens, seen, passes, steps: Some(steps), evaluations, notes, assumed: None })
    }

    /// Rows that are full to the last token: no run of these options has larger ones.
    fn assumed(config: &Config, plan: &Plan, source: &ModelSource) -> Shapes {
        let samples = config.task.purpose() == Purpose::Prompts;
        let (of_prompt, of_answer) = prompt_and_answer(config, plan.sequence_len);
        let row = if samples { of_prompt + of_answer } else { plan.sequence_len };
        let (batch, seq_len) = fixed_lengths(config, row);
        let tokens = batch * seq_len;
        let packed = config.data.sample_packing || config.template.padding_free;
        let documents = if packed { Documents::Packed } else { Documents::Rows };
        let shared = (samples && plan.compile.branches.is_some()).then(|| shared_shape(config, of_prompt, of_answer));
        let images = source.image_form();
        let patches = images.map_or(0, |form| form.padded(tokens * form.group()));
        let image = patches.min(ASSUMED_IMAGE);
        let what = if images.is_some() { format!("images of {image} patches") } else { "text".to_owned() };
        let mut assumed = format!("rows of {row} tokens of {what}, all of them full");
        if samples {
            assumed = format!("prompts of {of_prompt} tokens, answers of {of_answer}");
        } else if plan.length_is_open {
            assumed =
                format!("rows of {row} tokens of {what}, the maximum if `sequence_len` is not set, all of them full");
        }
        if config.data.sample_packing {
            assumed += &format!(" of {DOCUMENTS_PER_ROW} documents");
        }
        let (variant, of_shared) = match shared {
            Some((variant, seen)) => (variant, Some(seen)),
            None => (Variant { batch, seq_len, documents, patches, logits: 0 }, None),
        };
        let tokens = if of_shared.is_some() { variant.seq_len } else { tokens };
        let of_packing = if config.data.sample_packing { 1.0 / DOCUMENTS_PER_ROW as f64 } else { 1.0 };
        let documents = of_shared.unwrap_or(of_packing);
        let image = image as f64;
        let of_patch =
            OfPatch { image, window: images.map_or(image, |form| form.patches_of_window() as f64).min(image) };
        Shapes {
            variants: vec![variant],
            shares: vec![1.0],
            tokens: tokens as f64,
            seen: Seen { documents, patches: images.map(|_| of_patch) },
            passes: passes(config, plan.reference.as_ref()),
            steps: config.training.fixed_steps(),
            evaluations: (0, 0),
            notes: Vec::new(),
            assumed: Some(assumed),
        }
    }
}
