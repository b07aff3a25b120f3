"""A task of one's own for a run by rollouts: which letter stands at a place of a word.

    swarmnode task check examples/letters.py:Letters
    swarmnode run examples/letters.toml --task examples/letters.py:Letters

Every node needs this very file: the run names its hash. It runs in the trainer's sandbox.
"""

import random


class Letters:
    """Words of `difficulty` letters of a to f."""

    def generate(self, seed, difficulty):
        """A problem that follows from seed and difficulty, whatever it is; the methods below are given it."""
        rng = random.Random(seed)
        word = "".join(rng.choice("abcdef") for _ in range(difficulty))
        return word, rng.randrange(difficulty)

    def prompt(self, problem):
        word, place = problem
        return f"{word} {place + 1}: "

    def verify(self, problem, answer):
        """0 to 1. A stranger may have written the answer: read it, and never run it."""
        return float(answer.strip() == self.key(problem))

    def key(self, problem):
        """A right answer. It may be left out; with it, policies are taught the form of an answer first."""
        word, place = problem
        return word[place]
