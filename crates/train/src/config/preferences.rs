//! Options of losses of preferences. Names, values and defaults are those of TRL 1.16 where it has the thing.

use options::{Setting, choices, options};

use super::Task;

options! {
    /// Losses of `task: dpo`, `kto`, `orpo` and `cpo`, and of `grpo`. docs/preferences.md has the formulas.
    pub struct Preferences: "Preferences" {
        /// The loss; of `dpo` also a list, of which the weighted sum is taken. `dpo` and `cpo` begin with `sigmoid`, `kto`
        /// with `kto`, `grpo` with `dapo`; `orpo` has one loss.
        loss_type: Vec<PreferenceLoss> = ["sigmoid"];
        /// Weights of the losses of `loss_type`, in its order. Null: 1 each. Of `dpo`.
        loss_weights: Option<Vec<f64>> = null;
        /// Strength of the constraint to the reference: larger values stay nearer to it. `orpo`: weight of the odds ratio;
        /// `cpo`: scale of the difference of both sides; `grpo`: weight of the KL divergence, which begins at 0.
        /// `distil`: 0 is the forward KL divergence, 1, where it begins, the reverse one, and between is the generalized
        /// Jensen-Shannon divergence.
        beta: f64 = 0.1, min = 0, max = 1000000;
        /// Probability that a pair is labeled the wrong way round. With `sigmoid` this is conservative DPO, where TRL
        /// ignores it. Of `dpo` and `cpo`.
        label_smoothing: f64 = 0.0, min = 0, below = 1;
        /// The divergence from the reference.
        f_divergence_type: Divergence = "reverse_kl";
        /// The coefficient of `f_divergence_type: alpha_divergence`.
        f_alpha_divergence_coef: f64 = 0.5, above = 0;
        /// Weight of the tokens of an answer beyond the length of the shorter answer of its pair. Null: 1.
        ld_alpha: Option<f64> = null, min = 0, max = 1;
        /// Temperature of `loss_type: discopop`.
        discopop_tau: f64 = 0.05, above = 0, max = 1000000;
        /// Weigh each pair by how likely the model finds it (WPO).
        use_weighting: bool = false;
        /// Take all log-probabilities of the reference as 0: no reference is computed.
        reference_free: bool = false;
        /// Folder of the model that is the reference, of the same architecture. Null: the weights that training starts from,
        /// for adapters the model without them. Of `dpo`, `kto` and `grpo`.
        reference: Option<String> = null, path;
        /// Compute the log-probabilities of the reference for all rows before the first step, and keep them in memory and in
        /// the `data_cache`. A reference with weights of its own leaves the device before those of the training come, and no
        /// later pass over the data computes one. Of `dpo`, and of losses of `kto` that estimate no divergence.
        precompute_ref_log_probs: bool = false;
        /// Compute a prompt once for all of its answers: they follow it in one document, and none sees another. The numbers are
        /// the same but for rounding. `auto`: where the model can, whose attention has to be causal and to see whole
        /// documents. Of `dpo`, `orpo`, `cpo`, `reward` and `grpo`.
        share_prompts: Setting<bool> = auto;
        /// Weight of the good answers of `kto`.
        desirable_weight: f64 = 1.0, min = 0, max = 1000000;
        /// Weight of the bad answers of `kto`.
        undesirable_weight: f64 = 1.0, min = 0, max = 1000000;
        /// Weight of the cross entropy of chosen answers in `cpo`. Null: 1, with `loss_type: simpo` and `alphapo` 0.
        cpo_alpha: Option<f64> = null, min = 0, max = 1000000;
        /// Margin that `loss_type: simpo` and `alphapo` want between both sides.
        simpo_gamma: f64 = 0.5, min = 0, max = 1000000;
        /// Exponent by which AlphaPO shapes the rewards of `loss_type: simpo` and `alphapo`. 0: none, the rewards are
        /// those of SimPO.
        alpha: f64 = 0.0, min = -1000, max = 1000;
        /// Cross entropy in `orpo`.
        nll: Nll = "trl";
        /// Weight of the squared sum of both rewards in `reward`, which keeps their mean near 0. Null: 0.
        center_rewards_coefficient: Option<f64> = null, min = 0, max = 1000000;
    }
}

choices! {
    /// A loss of a pair of a chosen and a rejected answer, or of an answer with a verdict.
    pub enum PreferenceLoss {
        /// The logistic loss of DPO on the difference of the log-ratios.
        Sigmoid = "sigmoid",
        /// The hinge loss of SLiC with a margin of 1.
        Hinge = "hinge",
        /// IPO with means over the tokens, as TRL has it.
        Ipo = "ipo",
        /// IPO with sums over the tokens, as in the paper.
        IpoPaper = "ipo_paper",
        /// Robust DPO, for labels that are wrong with the probability `label_smoothing`.
        Robust = "robust",
        /// Conservative DPO: `sigmoid` under the name of its paper.
        Cdpo = "cdpo",
        /// EXO: reverse KL divergence to the smoothed label.
        ExoPair = "exo_pair",
        /// NCA: the likelihood of the chosen answer does not fall.
        NcaPair = "nca_pair",
        /// BCO on pairs without a shift, as TRL has it.
        BcoPair = "bco_pair",
        /// BCO on pairs, shifted by the mean reward of the micro-batch.
        BcoPairPaper = "bco_pair_paper",
        /// The squared loss of SPPO with hard labels, 1 and 0.
        SppoHard = "sppo_hard",
        /// AOT: quantiles of the margins over the micro-batch.
        Aot = "aot",
        /// AOT with the quantiles of each side of the pairs.
        AotUnpaired = "aot_unpaired",
        /// APO-zero: chosen answers become likelier.
        ApoZero = "apo_zero",
        /// APO-down: chosen answers become less likely, rejected ones more so.
        ApoDown = "apo_down",
        /// DiscoPOP: a mixture of the logistic and the exponential loss.
        Discopop = "discopop",
        /// DPO with means over the tokens (Tülu 3).
        SigmoidNorm = "sigmoid_norm",
        /// Cross entropy of the chosen answers, a mean over all their tokens in the micro-batch.
        Sft = "sft",
        /// Cross entropy of the chosen answers, a mean of the means of answers (RPO).
        NllPaper = "nll_paper",
        /// SimPO: means over the tokens without a reference, with the margin `simpo_gamma`. Of `cpo`.
        Simpo = "simpo",
        /// AlphaPO: SimPO with rewards that `alpha` shapes. Of `cpo`.
        Alphapo = "alphapo",
        /// The loss of KTO: rewards against the divergence from the reference. Of `kto`.
        Kto = "kto",
        /// APO-zero on answers with verdicts. Of `kto`.
        ApoZeroUnpaired = "apo_zero_unpaired",
        /// BCO on answers with verdicts, shifted by the mean reward of the micro-batch. Of `kto`.
        BcoPaper = "bco_paper",
        /// The clipped ratio of GRPO, a mean of the means of answers. Of `grpo`.
        Grpo = "grpo",
        /// The same, a mean over the tokens of a micro-batch. Of `grpo`.
        Bnpo = "bnpo",
        /// Dr. GRPO: the same, a sum over the tokens divided by `max_completion_length`. Of `grpo`.
        DrGrpo = "dr_grpo",
        /// DAPO: the same, a mean over the tokens of the step. Of `grpo`.
        Dapo = "dapo",
        /// LUSPO: the same, a sum over the tokens. Of `grpo`.
        Luspo = "luspo",
        /// CISPO: log-probabilities with clipped ratios as weights. Of `grpo`.
        Cispo = "cispo",
        /// SAPO: a soft gate in place of the clipped ratio. Of `grpo`.
        Sapo = "sapo",
        /// VESPO: log-probabilities with weights from the ratios of whole answers. Of `grpo`.
        Vespo = "vespo",
    }
}

choices! {
    /// The cross entropy next to the odds ratio of ORPO.
    pub enum Nll {
        /// A mean over the tokens of the prompts and the chosen answers of a micro-batch, as TRL has it.
        Trl = "trl",
        /// A mean over the tokens of each chosen answer, as in the paper.
        Paper = "paper",
    }
}

choices! {
    /// A divergence of the policy from the reference.
    pub enum Divergence {
        /// Reverse KL divergence, as in DPO: the plain log-ratio.
        ReverseKl = "reverse_kl",
        /// Forward KL divergence: minus the inverse of the ratio.
        ForwardKl = "forward_kl",
        /// Jensen-Shannon divergence between policy and reference.
        Js = "js_divergence",
        /// Alpha divergence with the coefficient `f_alpha_divergence_coef`.
        Alpha = "alpha_divergence",
    }
}

impl PreferenceLoss {
    /// The tasks that have it.
    pub(super) fn tasks(self) -> &'static [Task] {
        use PreferenceLoss as L;
        match self {
            L::Sigmoid | L::Hinge | L::Ipo => &[Task::Dpo, Task::Cpo],
            L::Simpo | L::Alphapo => &[Task::Cpo],
            L::Kto | L::ApoZeroUnpaired | L::BcoPaper => &[Task::Kto],
            L::Grpo | L::Bnpo | L::DrGrpo | L::Dapo | L::Luspo | L::Cispo | L::Sapo | L::Vespo => &[Task::Grpo],
            _ => &[Task::Dpo],
        }
    }
}

impl Preferences {
    /// Says whether the loss subtracts an estimate of the divergence from the reference.
    pub(crate) fn estimates_divergence(&self) -> bool {
        self.loss_type.contains(&PreferenceLoss::Kto)
    }
}
