"""Prompts for the tests on the default model: forty, ten from each of four tasks.

They come from a file of JSON lines with `category` and `turns` where one is given (`--prompts`, Spec-Bench's format),
else from the sets below, which were written for this project.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

TASKS = ("translation", "summarization", "qa", "math_reasoning")
PER_TASK = 10
_SHORTEST = 2 * PER_TASK
"""The prompts are drawn from this many of the shortest of a task: long ones would spend the tests' time on reading."""


def load(file: Path | None) -> list[str]:
    """`PER_TASK` prompts of each task; the same ones on every run.

    Raises:
        ValueError: the file has too few of a task.
    """
    if file is None:
        return [prompt for task in TASKS for prompt in BUILT_IN[task]]
    by_task: dict[str, list[str]] = {task: [] for task in TASKS}
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["category"] in by_task:
                by_task[row["category"]].append(row["turns"][0])
    short = {task: sorted(texts, key=len)[:_SHORTEST] for task, texts in by_task.items()}
    return [prompt for task in TASKS for prompt in random.Random(0).sample(short[task], PER_TASK)]


_NOTICES = (
    "The swimming hall on Mill Street closes from the third to the nineteenth of July, because the old filters are "
    "replaced by new ones. Season tickets are extended by seventeen days without any application. During these weeks "
    "the open-air pool at the lake opens an hour earlier, at seven in the morning, and takes season tickets of the hall. "
    "Swimming lessons for children take place at the lake; lessons for adults are made up for in August.",
    "Between the stations Norden and Hafen the last train of the evening is replaced by a bus until further notice. The "
    "bus leaves from the square in front of the station, not from the platform, ten minutes before the train would have "
    "left. Bicycles cannot be taken along. Travellers who miss a connection because of the bus may use the next train of "
    "any company with their ticket, and are asked to keep it until the end of the journey.",
    "A survey of four hundred gardens in the valley found more wild bees than expected. The largest numbers lived where "
    "the grass was cut no more than twice a year and dead wood was left lying. Gardens with many kinds of flowers but "
    "short grass did hardly better than those without flowers. The authors advise leaving a strip along the fence uncut "
    "from April to September, and putting up wood with holes only where it stays dry.",
    "The library lends tools now. Drills, saws, ladders and a sewing machine can be taken home for a week with an "
    "ordinary card. Each tool comes with a sheet that explains how to use it safely, and the staff show it on request. "
    "Whoever returns a tool late pays one euro a day; whoever returns it dirty is asked to clean it on the spot. So far "
    "no tool has been lost, and the waiting list for the sewing machine is eleven weeks long.",
    "The bridge over the Aller will be weighed this month. Forty lorries filled with sand drive onto it one after the "
    "other, while gauges measure how far each span bends. Engineers compare the figures with those of 1974, when the "
    "bridge was opened. If a span bends by more than four centimetres, lorries over twenty tonnes will have to take the "
    "road through Celle. Pedestrians may watch from the northern bank.",
    "Bread from the bakery at the market is baked at night, sold from six in the morning on, and given away after seven "
    "in the evening. What is left at eight goes to a farm, where pigs eat it. The baker says that she throws nothing "
    "away, and that the free bread brings customers who come back in the morning and pay. Two other bakeries in the town "
    "have begun to do the same.",
    "The ice on the pond is eight centimetres thick and may be walked on. Skating is allowed from twelve centimetres on, "
    "which the wardens expect by Thursday if the nights stay cold. Near the inflow on the western side, where warm water "
    "comes from the laundry, the ice remains thin all winter; a red rope marks the place. Dogs are to be kept on a lead, "
    "and fires are to be lit on the bank only.",
    "The school orchestra looks for players of the viola and the bassoon. No experience is needed, because instruments "
    "are lent and lessons are free in the first year. Rehearsals are on Tuesdays after the sixth lesson. In spring the "
    "orchestra travels to its partner school for five days; the journey is paid by the friends of the school, except "
    "for pocket money. Those who are interested may come to any rehearsal and listen.",
    "Two lighthouses stood on the island. The older one, of wood, burnt down in 1811 and was never rebuilt, although its "
    "foundation can still be seen at low tide. The younger one, of brick, was lit with oil, then with gas, and since 1936 "
    "with electricity. Its keeper left in 1988, when a computer took over. Visitors may climb its one hundred and "
    "twenty-six steps on weekends, if the wind is not too strong.",
    "From next year on the town collects kitchen waste every week in summer and every second week in winter. The brown "
    "bins are free; bags of paper can be had at the town hall, bags of plastic must not be used, even if they are said to "
    "rot. The waste is turned into gas, which drives nine of the town's buses, and what remains goes to the fields. "
    "Households with a compost heap of their own need no bin and pay less.",
)

_SENTENCES = (
    "Der Zug nach Bremen fährt heute von Gleis sieben ab, weil Gleis fünf gesperrt ist.",
    "Wenn es morgen nicht regnet, gehen wir mit den Kindern in den Wald und suchen Pilze.",
    "Meine Großmutter hat den Brief, den sie 1953 geschrieben hatte, nie abgeschickt.",
    "Die Bibliothek ist montags geschlossen, aber die Bücher kann man jederzeit zurückgeben.",
    "Niemand wusste, warum der Hund jeden Abend um dieselbe Zeit vor der Tür saß.",
    "Bitte schalten Sie das Licht aus, bevor Sie den Raum als Letzter verlassen.",
    "Der Arzt empfahl ihm, weniger zu arbeiten, mehr zu schlafen und im Sommer ans Meer zu fahren.",
    "In der alten Mühle am Fluss wird seit zwei Jahren wieder Mehl gemahlen.",
    "Sie hatte den Schlüssel verloren und musste bis Mitternacht auf ihren Bruder warten.",
    "Trotz des starken Windes kamen alle Boote vor Einbruch der Dunkelheit in den Hafen zurück.",
)

BUILT_IN = {
    "translation": tuple(f"Translate German to English: {sentence}" for sentence in _SENTENCES),
    "summarization": tuple(f"Summarize: {notice}\nSummary:" for notice in _NOTICES),
    "qa": (
        "which planet has the most moons",
        "who invented the printing press with movable letters",
        "what is the difference between a lake and a pond",
        "why does bread rise in the oven",
        "when was the first bicycle with pedals built",
        "how do bees find their way back to the hive",
        "what is the longest river in europe",
        "why is the sky red in the evening",
        "who wrote the first dictionary of the english language",
        "how many strings does a violin have and what are they called",
    ),
    "math_reasoning": (
        "A baker sells 48 rolls in the morning and half as many in the afternoon. How many rolls does she sell in a week "
        "of six days?",
        "A train leaves at 9:40 and takes 2 hours and 35 minutes. The next one leaves an hour later and takes 20 minutes "
        "less. When does each of them arrive?",
        "Tom has three times as many marbles as Eva. Together they have 84. How many does each of them have?",
        "A garden is 12 metres long and 7 metres wide. A path of one metre runs around it. How large is the path?",
        "Four friends share a bill of 92 euros. Two of them pay 5 euros more than the others. What does each one pay?",
        "A tank holds 600 litres. One pipe fills it in 20 minutes, another one empties it in 30. How long does it take to "
        "fill it with both open?",
        "A book has 340 pages. Anna reads 25 pages on each weekday and 40 on Saturdays and Sundays. After how many days "
        "has she finished it?",
        "Apples cost 2 euros a kilogram, pears 3. Mr Berg buys 7 kilograms of fruit for 17 euros. How much is that of each?",
        "A rope of 30 metres is cut into pieces of 4 metres. How many pieces are there, and how much rope is left over?",
        "A shop lowers a price of 80 euros by 15 percent and then raises it by 15 percent. What is the price now?",
    ),
}
