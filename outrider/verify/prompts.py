"""What the pair is asked.

`TEXTS` are continued for many tokens and compared id by id: prose, lists, code, numbers, other languages, and texts
that repeat themselves, so that prompt lookup has something to propose. `OPENINGS` are short, because their law is
sampled thousands of times; the search takes the one on which most drafted tokens are rejected. Some leave much open for
any draft; the others offer prompt lookup several continuations.
"""

from __future__ import annotations

TEXTS = (
    "The ferry to Gull Island leaves from pier three at nine in the morning and at four in the afternoon. The ferry to",
    "Question: Why is the sky blue?\nAnswer: The sky is blue because",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\ndef factorial(n):",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "Translate to French.\nEnglish: Good morning. French: Bonjour.\nEnglish: Thank you. French: Merci.\nEnglish: No.",
    "Once upon a time there was a lighthouse keeper who",
    '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Alan", "age": 41, "city": "Leeds"}\n{"name": "Grace",',
    "Shopping list:\n- apples\n- bread\n- cheese\n- apples\n- bread\n-",
    "To whom it may concern,\n\nI am writing to",
    "The meeting was moved from Monday to Tuesday. The second meeting was moved from Tuesday to",
    "Die Hauptstadt von Frankreich ist Paris. Die Hauptstadt von Italien ist",
    "<ul>\n  <li>one</li>\n  <li>two</li>\n  <li>three</li>\n</ul>\n<ul>\n  <li>",
)

OPENINGS = (
    "I think that",
    "The best way to",
    "He opened the door and",
    "My name is",
    "In the year",
    "It was a dark and",
    "She said that the",
    "There are many",
    "Yesterday we went to the",
    "The color of the",
    "red cat, red dog, red cat, red hat, red cat, red",
    "one two one three one two one four one two one",
    "yes no yes yes no no yes no yes",
    "a b a c a b a d a b a",
    "Tom ate an apple. Tom ate a pear. Tom ate an apple. Tom ate",
    "heads, tails, heads, heads, tails, heads, tails, tails, heads,",
    "up down up up down up down down up",
    "left right left left right left right right left",
)
