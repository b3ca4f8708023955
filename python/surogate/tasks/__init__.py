"""The tasks that models are trained for, one file each. Importing a file registers it."""

from . import causal_lm, cpo, distil, dpo, grpo, kto, orpo, reward

__all__ = ["causal_lm", "cpo", "distil", "dpo", "grpo", "kto", "orpo", "reward"]
