"""Losses of sampled answers with advantages: GRPO (Shao et al. 2024, arXiv:2402.03300) and its kin.

docs/reinforcement.md has the formulas. Values of samples lie in the first entries of tensors [B, T].
"""

from __future__ import annotations

import math
import struct
from typing import Any

from ..dsl import Batch, Module, Results, Tensor, ops, output, task
from .answers import exp, mean_over_batch, none, reciprocal, sigmoid

#: The largest f32 that is a bound where there is none, and the largest exponent of a ratio: infinity times 0 is no number.
LARGEST, HIGHEST = 3e38, 80.0

#: log 1e-8, below which VESPO has no ratio, and the bound above it.
LOWEST_RATIO, HIGHEST_RATIO = math.log(1e-8), 20.0


@task("grpo")
class GRPO(Module):
    """Marks `loss_sum`, `weight_sum`, which is what the loss is a mean over, and the sums of the metrics."""

    def __init__(
        self,
        config: Any,
        *,
        loss: str,
        beta: float,
        temperature: float,
        epsilon: float,
        epsilon_high: float,
        delta: float | None,
        level: str,
        sapo_temperatures: tuple[float, float],
        vespo: tuple[float, float, float, float],
        corrected_kl: bool,
        off_policy_threshold: float | None,
        top_entropy: float,
        correction: str | None,
        correction_bounds: tuple[float, float],
        longest: int,
    ) -> None:
        self.loss, self.beta, self.temperature = loss, beta, temperature
        self.low, self.high, self.delta = epsilon, epsilon_high, delta
        self.of_sequences = level == "sequence"
        self.sapo_temperatures, self.vespo = sapo_temperatures, vespo
        self.corrected_kl, self.off_policy_threshold, self.top_entropy = corrected_kl, off_policy_threshold, top_entropy
        self.correction, self.correction_bounds, self.longest = correction, correction_bounds, longest
        self.entries = ("reference", "train", "evaluate") if beta else ("train", "evaluate")
        self.metrics = ["entropy", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"]
        self.metrics += ["sampling/importance_sampling_ratio/mean"] if correction else []
        self.metrics += ["kl"] if beta else []
        match loss:
            case "cispo":
                self.metrics += ["cispo_clip_ratio"]
            case "vespo":
                self.metrics += ["vespo/phi_seq_mean"]
            case "sapo":
                pass
            case _:
                names = ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
                self.metrics += [f"clip_ratio/{name}" for name in names]

    def forward(self, of: Results, batch: Batch) -> None:
        """Outputs the clipped policy loss of the sampled answers, weighted by their advantages, and metrics."""
        logits = at_temperature(of["logits"], self.temperature)
        token_loss, _ = ops.cross_entropy(logits, batch.targets)
        entropy, _, _, _ = ops.token_statistics(logits, batch.targets)
        samples = Samples(batch)
        mask, logps = batch.weights, -token_loss
        frozen = ops.detach(logps)
        old = batch.old_logps + frozen * (1.0 - batch.old_known)
        log_ratio = (logps - old) * mask
        ratio = exp(ops.clip(self.of_level(log_ratio, samples), low=-LARGEST, high=HIGHEST))
        drift = (old - batch.sampling_logps) * batch.sampling_known * mask
        correction = self.corrected(drift, samples) if self.correction else None
        metrics: list[tuple[Tensor, Tensor]] = []
        loss = self.surrogate(ratio, log_ratio, logps, drift, correction, samples, metrics)
        if self.off_policy_threshold is not None:
            # What it was drawn with, or else the policy before its updates.
            drawn = old + (batch.sampling_logps - old) * batch.sampling_known
            mean = samples.mean((drawn - frozen) * mask)
            dropped = above(mean, self.off_policy_threshold) * samples.is_bad
            loss = loss * samples.spread(1.0 - dropped)
        if self.top_entropy < 1.0:
            loss = loss * self.uncertain(entropy, batch)
        if correction is not None and self.loss != "vespo":
            loss = loss * correction
        rows: list[tuple[Tensor, Tensor]] = [(entropy, mask)]
        distance = ops.activation(drift, function="relu") + ops.activation(-drift, function="relu")
        first = batch.first_pair
        rows += [(distance, batch.sampling_known * mask), (largest(distance), first)]
        rows += [(correction, mask)] if correction is not None else []
        if self.beta:
            away = batch.reference_logps - logps
            kl = exp(ops.clip(away, low=-LARGEST, high=HIGHEST)) - away - 1.0
            kl = kl * ratio if self.corrected_kl else kl
            loss = loss + kl * self.beta
            rows.append((kl, mask))
        total, count = self.reduced(loss * mask, samples)
        loss_sum, weight_sum = ops.weighted_sum(total, count)
        output("loss_sum", loss_sum)
        output("weight_sum", weight_sum)
        output("task_report", ops.task_report(*(value for row in rows + metrics for value in row)))

    def of_level(self, log_ratio: Tensor, samples: Samples) -> Tensor:
        """The logarithm of the ratio of each token, or the mean over its sample (GSPO, arXiv:2507.18071)."""
        return samples.spread(samples.mean(log_ratio)) if self.of_sequences else log_ratio

    def surrogate(
        self,
        ratio: Tensor,
        log_ratio: Tensor,
        logps: Tensor,
        drift: Tensor,
        correction: Tensor | None,
        samples: Samples,
        metrics: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """The loss of each token before corrections; adds metrics of the loss."""
        advantage, good, bad = (samples.spread(of) for of in (samples.advantage, samples.is_good, samples.is_bad))
        weights = samples.weights if self.of_sequences else samples.mask
        values = (lambda of: samples.mean(of * samples.mask)) if self.of_sequences else (lambda of: of)
        match self.loss:
            case "cispo":
                metrics.append((values(above(ratio, self.high) * good), weights))
                return ops.detach(ops.clip(ratio, low=0.0, high=self.high)) * advantage * -logps
            case "sapo":
                of_good, of_bad = (self.soft(ratio, of) for of in self.sapo_temperatures)
                return -(of_bad + (of_good - of_bad) * good) * advantage
            case "vespo":
                phi = self.phi(log_ratio, drift, correction, samples)
                metrics.append((phi, samples.weights))
                return ops.detach(samples.spread(phi)) * advantage * -logps
        # min(ρA, clip(ρ)A) by the sign of A.
        delta = LARGEST if self.delta is None else self.delta
        of_good = ops.clip(ratio, low=0.0, high=min(1.0 + self.high, delta))
        of_bad = ops.clip(ratio, low=1.0 - self.low, high=max(1.0 + self.high, delta))
        capped = ratio if self.delta is None else ops.clip(ratio, low=0.0, high=delta)
        below = above(-capped, self.low - 1.0) * bad
        beyond = above(capped, 1.0 + self.high) * good
        metrics += [(values(of), weights) for of in (below, beyond, below + beyond)]
        of_samples = [samples.mean(of * samples.mask) for of in (below, beyond)]
        extremes = (-largest_of_samples(-of_samples[0], samples), largest_of_samples(of_samples[1], samples))
        metrics += [(of, samples.first) for of in extremes]
        return -(of_good * good + of_bad * bad) * advantage

    def soft(self, ratio: Tensor, temperature: float) -> Tensor:
        """The gate of SAPO (arXiv:2511.20347)."""
        return sigmoid((ratio - 1.0) * temperature) * (4.0 / temperature)

    def phi(self, log_ratio: Tensor, drift: Tensor, correction: Tensor | None, samples: Samples) -> Tensor:
        """The weight of VESPO of each sample: e^λ·w^k·e^(−λw) of the ratio w of the sample."""
        total = samples.sum(ops.clip(ops.detach(log_ratio), low=-20.0, high=HIGHEST_RATIO))
        if correction is not None:
            low, high = self.correction_bounds
            by_sequence = "sequence" in str(self.correction)
            log_correction = samples.sum(drift) if by_sequence else drift
            if "truncate" in str(self.correction):
                low, high = (math.log(of) if of > 0.0 else LOWEST_RATIO for of in (low, high))
                log_correction = ops.clip(log_correction, low=low, high=high)
            else:
                kept = exp(ops.clip(log_correction, low=-HIGHEST, high=HIGHEST))
                kept = within(kept, self.correction_bounds)
                log_correction = log_correction * kept + (1.0 - kept) * LOWEST_RATIO
            log_correction = ops.clip(log_correction, low=LOWEST_RATIO, high=HIGHEST_RATIO)
            total = total + (log_correction if by_sequence else samples.sum(log_correction * samples.mask))
        log_w = ops.clip(total, low=LOWEST_RATIO, high=HIGHEST_RATIO)
        w = exp(log_w)

        def of(k: float, rate: float) -> Tensor:
            return exp(log_w * k - w * rate + rate)

        k_good, rate_good, k_bad, rate_bad = self.vespo
        for_good, for_bad = of(k_good, max(rate_good, 1e-4)), of(k_bad, max(rate_bad, 1e-4))
        return for_good + (for_bad - for_good) * samples.is_bad

    def corrected(self, drift: Tensor, samples: Samples) -> Tensor:
        """The weight of each token for the sampler that gave other probabilities, as a constant: the ratio of both, cut off
        at the bounds (TIS), or 0 beyond them (MIS)."""
        low, high = self.correction_bounds
        drift = ops.detach(drift)
        whole = samples.spread(samples.sum(drift)) if "sequence" in str(self.correction) else drift
        weight = exp(ops.clip(whole, low=-LARGEST, high=HIGHEST))
        if "truncate" in str(self.correction):
            return ops.clip(weight, low=low, high=high)
        return weight * within(weight, self.correction_bounds)

    def uncertain(self, entropy: Tensor, batch: Batch) -> Tensor:
        """1 for tokens whose entropy is among the largest of the micro-batch (arXiv:2506.01939)."""
        far, every = 1e9, batch.weights * 0.0 + 1.0
        ascending = ops.sorted(ops.detach(entropy) + (1.0 - batch.weights) * far, every)[0]
        # The first entry that is not below the quantile.
        too_low = above(-batch.ranks, -(1.0 - self.top_entropy))
        least = ops.sorted(ascending + too_low * far, every)[0]
        quantile = ops.batch_sum(least * batch.first_pair)
        return (1.0 - ops.activation(quantile - ops.detach(entropy), function="step")) * batch.weights

    def reduced(self, loss: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """Values whose weighted mean over the step is the loss, and their weights."""
        match self.loss:
            case "grpo" | "sapo":
                return samples.mean(loss), samples.weights
            case "luspo":
                return samples.sum(loss), samples.weights
            case "dr_grpo":
                return samples.sum(loss) * (1.0 / self.longest), samples.weights
            case "bnpo":
                return mean_over_batch(loss, samples.mask), samples.first
            case _:
                return loss, samples.mask


@task("tempered_lm")
class TemperedLM(Module):
    """Marks `token_loss` [B, T], the cross entropy of the next token at the temperature of samples, and its sums."""

    def __init__(self, config: Any, *, temperature: float) -> None:
        self.temperature = temperature

    def forward(self, of: Results, batch: Batch) -> None:
        """Outputs the cross entropy at the sampling temperature, and its weighted sum."""
        token_loss, _ = ops.cross_entropy(at_temperature(of["logits"], self.temperature), batch.targets)
        output("token_loss", token_loss)
        loss_sum, weight_sum = ops.weighted_sum(token_loss, batch.weights)
        output("loss_sum", loss_sum)
        output("weight_sum", weight_sum)


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """The logits divided by the temperature, which the sampler has in f32."""
    (rounded,) = struct.unpack("f", struct.pack("f", temperature))
    return logits if rounded == 1.0 else logits * (1.0 / rounded)


class Samples:
    """Sums over each sampled answer of a micro-batch."""

    def __init__(self, batch: Batch) -> None:
        self.documents, self.mask, self.weights, self.first = batch.documents, batch.weights, batch.pair_weights, batch.first_pair
        self.advantage = batch.advantages
        #: 1 for the samples with an advantage above 0, and for those below.
        self.is_good = ops.activation(batch.advantages, function="step")
        self.is_bad = ops.activation(-batch.advantages, function="step")
        length = self.sum(batch.weights)
        self.per_token = reciprocal(length + none(length))

    def sum(self, tokens: Tensor) -> Tensor:
        """The sum over the tokens of each answer."""
        return ops.document_sum(tokens, self.documents, every=1, at=0)

    def mean(self, tokens: Tensor) -> Tensor:
        """Means over the trained tokens; 0 where there are none."""
        return self.sum(tokens) * self.per_token

    def spread(self, values: Tensor) -> Tensor:
        """The value of each answer at each of its tokens."""
        return ops.document_spread(values, self.documents, every=1, at=0)


def above(x: Tensor, bound: float) -> Tensor:
    """1 where x is larger than the bound."""
    return ops.activation(x - bound, function="step")


def within(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    """1 where x is within the bounds."""
    low, high = bounds
    return (1.0 - above(x, high)) * (1.0 - above(-x, -low))


def largest(tokens: Tensor) -> Tensor:
    """The tokens' values in falling order."""
    return -ops.sorted(-tokens, tokens * 0.0 + 1.0)[0]


def largest_of_samples(values: Tensor, samples: Samples) -> Tensor:
    """The samples' values in falling order."""
    return -ops.sorted(-values, samples.weights)[0]
