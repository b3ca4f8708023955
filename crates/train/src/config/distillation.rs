//! Options of `task: distil`: the teacher, and how its distributions reach the loss. Names, values and defaults are those of
//! TRL 1.16 where it has the thing.

use options::options;

options! {
    /// The teacher and the loss of `task: distil`. docs/distillation.md has the formulas.
    pub struct Distillation: "Distillation" {
        /// The model whose distributions of tokens are learned, with the same vocabulary: a folder, or a name on the Hub.
        /// It may be of another family. Not needed with `quantize_aware`, whose teacher is the model as it was.
        teacher: Option<String> = null, path;
        /// Number of the teacher's likeliest tokens that the loss is taken over. 0: the whole vocabulary, whose logits go
        /// from the teacher to the loss through host memory. Other numbers need `beta: 0`.
        loss_top_k: u64 = 0, max = 1024;
        /// With `loss_top_k`, count all other tokens as one more. False: both distributions are renormalized.
        loss_add_tail: bool = true;
        /// Compute the teacher's likeliest tokens of all documents before training, and keep them on disk next to the encoded rows
        /// (`data_cache`), 8 bytes × `loss_top_k` for each trained token: the teacher takes no memory during training, and later
        /// epochs and runs over the same rows take no time for it. Needs `loss_top_k`.
        precompute_teacher: bool = false;
        /// Share of the steps that train on answers of the student: they are sampled to the prompts of the data, before each
        /// document's last answer, and the teacher's distributions of their tokens are learned (GKD). With
        /// `max_completion_length`, `top_p`, `top_k` and `min_p` as in `task: grpo`.
        lmbda: f64 = 0.0, min = 0, max = 1;
        /// Temperature of these samples; `temperature` is that of the distributions in the loss.
        sampling_temperature: f64 = 1.0, above = 0, max = 1000;
        /// Weight of the cross entropy of the data's tokens, which is added to the loss.
        cross_entropy_weight: f64 = 0.0, min = 0, max = 1000000;
    }
}
