"""Rewards of answers: the scores of a reward model, and reward functions with the process that runs them."""
