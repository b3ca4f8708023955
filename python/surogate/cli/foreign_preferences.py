"""Entries of other tools on preferences and rewards: their tasks, losses, weights and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .foreign import Draft, Source

#: What Axolotl calls `rl`: the task, and its loss where it is not the usual one.
OF_AXOLOTL = {
    "dpo": ("dpo", None),
    "ipo": ("dpo", "ipo"),
    "kto": ("kto", None),
    "orpo": ("orpo", None),
    "simpo": ("cpo", "simpo"),
}

#: What LLaMA-Factory calls `stage`.
OF_LLAMA_FACTORY = {"sft": "sft", "pt": "pt", "dpo": "dpo", "kto": "kto", "rm": "reward"}

#: Values of `pref_loss`: those of other tasks, and those of `dpo` under another name.
OTHER_TASKS = {"orpo": ("orpo", None), "simpo": ("cpo", "simpo"), "kto_pair": ("kto", None)}

#: Names of an option, and what it is here.
NAMES = {
    "beta": ("rl_beta", "pref_beta", "orpo_alpha"),
    "label_smoothing": ("dpo_label_smoothing",),
    "reference": ("ref_model", "ref_model_path"),
    "desirable_weight": ("kto_desirable_weight", "kto_chosen_weight"),
    "undesirable_weight": ("kto_undesirable_weight", "kto_rejected_weight"),
    "reference_free": ("dpo_reference_free",),
    "use_weighting": ("dpo_use_weighting",),
}

#: Entries of TRL's configurations that only one of its trainers has, with the task.
OF_TRL = {
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "cpo_alpha": "cpo",
    "simpo_gamma": "cpo",
    "center_rewards_coefficient": "reward",
    "f_divergence_type": "dpo",
    "ld_alpha": "dpo",
    "loss_weights": "dpo",
    "precompute_ref_log_probs": "dpo",
    "num_generations": "grpo",
    "max_completion_length": "grpo",
    "reward_funcs": "grpo",
    "reward_weights": "grpo",
    "scale_rewards": "grpo",
}

#: Losses by which TRL's trainer is known.
LOSSES = {
    "kto": "kto",
    "apo_zero_unpaired": "kto",
    "simpo": "cpo",
    "alphapo": "cpo",
    **dict.fromkeys(("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"), "grpo"),
}


def of_axolotl(source: Source, draft: Draft) -> None:
    """The task of `rl`, or a reward model."""
    word = source.take("rl")
    if word is not None and str(word) in OF_AXOLOTL:
        draft.task, loss = OF_AXOLOTL[str(word)]
        if loss:
            draft.options["loss_type"] = loss
    elif word is not None:
        source.leave("rl", f"there is no training by {word}")
    if source.is_on("reward_model"):
        draft.task = "reward"
    _named(source, draft)
    weight = source.take("rpo_alpha")
    if weight is not None:
        _with_cross_entropy(draft, weight)


def of_llama_factory(source: Source, draft: Draft, stage: str) -> None:
    """The task of a stage with the loss of its preferences."""
    draft.task = OF_LLAMA_FACTORY[stage]
    loss = source.take("pref_loss", "dpo_loss")
    if draft.task == "dpo" and loss is not None:
        if str(loss) in OTHER_TASKS:
            draft.task, loss = OTHER_TASKS[str(loss)]
        if loss is not None:
            draft.options["loss_type"] = loss
    _named(source, draft)
    weight = source.take("pref_ftx", "dpo_ftx")
    if weight:
        _with_cross_entropy(draft, weight)


def of_trl(source: Source, draft: Draft) -> None:
    """The task of a configuration of one of TRL's trainers, which its file does not name."""
    left = source.rest()
    loss = left.get("loss_type")
    first = loss[0] if isinstance(loss, list) and loss else loss
    by_name = next((task for name, task in OF_TRL.items() if name in left), None)
    if by_name is None and str(first) in LOSSES:
        by_name = LOSSES[str(first)]
    if by_name is None and ("beta" in left or (first is not None and str(first) not in ("nll", "dft"))):
        by_name = "dpo"
    if by_name is not None:
        draft.task = by_name
    source.take("precompute_ref_log_probs")
    _named(source, draft)
    source.put("scale_rewards", "scale_rewards", by=lambda of: {True: "group", False: "none"}.get(of, of))
    _rewards(source, draft)


def _rewards(source: Source, draft: Draft) -> None:
    """Functions by their paths, `module.name`, or by the names of TRL's own, each with its weight."""
    functions, weights = source.take("reward_funcs"), source.take("reward_weights")
    names = functions if isinstance(functions, list) else str(functions).split(",") if functions else []
    weights = weights if isinstance(weights, list) or weights is None else [weights]
    if weights is not None and len(weights) != len(names):
        source.leave("reward_weights", f"{len(weights)} weights for {len(names)} functions in `reward_funcs`")
        weights = None
    rewards = []
    for name, weight in zip((str(name).strip() for name in names), weights or [None] * len(names), strict=True):
        module, _, attribute = name.rpartition("." if ":" not in name else ":")
        if "/" in module or "/" in attribute and not module.endswith(".py"):
            source.leave("reward_funcs", f"{name} is a reward model, and functions alone judge answers here")
            continue
        if not module:
            source.leave("reward_funcs", f"`{name}` is a function of TRL: `trl.rewards:{name}` needs it installed")
        rewards.append({"function": f"{module or 'trl.rewards'}:{attribute}"} | ({} if weight is None else {"weight": weight}))
    if rewards:
        draft.options["rewards"] = rewards


def _named(source: Source, draft: Draft) -> None:
    for option, names in NAMES.items():
        source.put(option, *names)


def _with_cross_entropy(draft: Draft, weight: Any) -> None:
    """DPO with the cross entropy of the chosen answers."""
    if draft.task == "dpo":
        loss = draft.options.get("loss_type", "sigmoid")
        draft.options |= {"loss_type": [loss, "sft"], "loss_weights": [1.0, float(weight)]}
