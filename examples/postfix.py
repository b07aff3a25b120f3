"""A task whose answers are little programs, which are run to check them: postfix expressions of x.

    swarmnode task check examples/postfix.py:Postfix
    swarmnode local --task examples/postfix.py:Postfix --rounds 100

`1>3 2>5 4>9 ` asks for what makes 3 of 1, 5 of 2 and 9 of 4, such as `x2*1+`. Whatever does that on these and on two
more numbers is right, so `xx+1+` is as well. The sandbox lets no other program run: what runs an answer is written
here, and it is bounded.
"""

import random

LONGEST = 32  # characters of an answer
GREATEST = 10**6
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def value(program, x):
    """What a postfix program makes of x; None where it is none, or goes beyond GREATEST."""
    stack = []
    for character in program:
        if character == "x":
            stack.append(x)
        elif character in "0123456789":
            stack.append(int(character))
        elif character in OPERATIONS and len(stack) > 1:
            right, left = stack.pop(), stack.pop()
            stack.append(OPERATIONS[character](left, right))
        else:
            return None
        if abs(stack[-1]) > GREATEST:
            return None
    return stack[0] if len(stack) == 1 else None


class Postfix:
    """A problem is a program of `difficulty` operations, and numbers: those shown, and two more that are tried."""

    def generate(self, seed, difficulty):
        rng = random.Random(seed)
        program = "x" + "".join(rng.choice("x123") + rng.choice("+-*") for _ in range(difficulty))
        return program, rng.sample(range(1, 10), 5)

    def prompt(self, problem):
        program, numbers = problem
        return " ".join(f"{x}>{value(program, x)}" for x in numbers[:3]) + " "

    def verify(self, problem, answer):
        program, numbers = problem
        text = answer.strip()
        return float(len(text) <= LONGEST and all(value(text, x) == value(program, x) for x in numbers))

    def key(self, problem):
        return problem[0]
