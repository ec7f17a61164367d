"""`outrider verify`: is what a deployed pair says distributed as its target alone would say it?

It asks the coordinator as any client does, at its HTTP door, with speculation on and off per request:

    texts.py    at temperature 0, and under the coupled rule at temperature 1, the ids must be equal
    law.py      under the standard rule at temperature 1 tokens 2 and 3 must have the same law: a two-sample test
    noise.py    where passes round differently with their batch, which differences are near ties
    search.py   the prompt on which that test sees most: one where many drafted tokens are rejected
    door.py     requests at the lowest priority
    check.py    all of it in order; report.py, command.py: what comes of it
"""
