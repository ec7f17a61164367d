# ruff: noqa: E501, SIM905 (lists of prose)
"""Words and sentence frames of the built-in prompts, written for this project."""

from __future__ import annotations

TOPICS = tuple(
    line.strip()
    for line in """
    the tides of the sea; how bees make honey; solar power on farms; the invention of paper; night trains across borders; a city without cars;
    the life of a lighthouse keeper; volcanoes under the ice; school gardens; the history of chess; how vaccines work; a strike at a harbour;
    learning the violin late in life; wolves returning to a valley; the price of bread; a flood in a river town; how bridges carry weight; the first public libraries;
    growing tomatoes on a balcony; deep-sea fish; the moons of Jupiter; a new tram line; rare coins; how glaciers shape valleys; sleep and memory; the spice trade;
    a museum of clocks; why leaves change colour; public swimming pools; migrating storks; a bakery run by two sisters; the Silk Road; how batteries store energy;
    desert plants; a football club in debt; folk dances of the Balkans; the printing press; earthquake warnings; how cheese ripens; street musicians; the Roman army;
    a missing painting; urban foxes; how computers add numbers; tea ceremonies; coral reefs; a marathon in the snow; the water cycle; weaving; how planes stay in the air;
    a village choir; antibiotics; the Vikings; electric buses; forest fires; how languages die; a chess tournament for children; mountain huts; the human heart; wind turbines off the coast;
    a town that banned fireworks; black holes; fishing quotas; handwriting; the French Revolution; a hospital for owls; how money was invented; remote work; the Amazon river; recycling glass;
    how a camera works; jazz clubs; an election in a small town; the ozone layer; pottery; ants and their colonies; the Great Wall; high-speed rail; food waste in restaurants; penguins;
    a robot that picks apples; the rules of rugby; public health in slums; sailing around the world; how the ear hears; snow leopards; a bank robbery that failed; kites; the Renaissance; plate tectonics;
    how to keep a diary; the cost of housing; underground rivers; an orchestra on tour; gravity; cooking for a crowd; bicycle lanes; the moon landing; how seeds travel; mobile phones in schools;
    stage fright; a ferry accident; medieval markets; the immune system; cloud computing; how rainbows form; a farm for llamas; inflation; the Olympic Games; sign language; dogs that find truffles;
    the stock market; hurricanes; how sugar affects the body; an old theatre saved from demolition; whales and their songs; encryption; drought in the south; the Ottoman Empire; hiking alone; a bus driver's day;
    artificial intelligence in medicine; the history of coffee; the digestive system; beekeeping on rooftops; photosynthesis; supply and demand; a lost cat; planning a wedding; travel on a small budget; the Cold War;
    repairing shoes; democracy in ancient Greece; mushrooms; noise in cities; machine translation; a prize for young scientists; climate change and wine; how vinegar is made; space telescopes; a court case about a tree;
    self-driving cars; the history of zero; bamboo as a building material; probability; the nervous system; customer service; a startup that grows salmon on land; the Industrial Revolution; how to give feedback; opera;
    tourism on small islands; minimum wages; DNA; how to learn vocabulary; a heat wave in the capital; the Aztecs; meditation; nuclear energy; the rules of poker; antique maps; data privacy; storks on chimneys
    """.replace("\n", " ").split(";")
)

PLACES = tuple(
    "Lisbon;Nairobi;Osaka;Bergen;Quito;Leeds;Accra;Perth;Riga;Boston;Lyon;Hanoi;Galway;Denver;Turin;Bremen;Dakar;Calgary;Split;Lima;Tampere;Cork;Oslo;Porto;Basel;Austin;Graz;Tunis;Ghent;Kyoto".split(
        ";"
    )
)
NAMES = tuple(
    "Mara;Tobias;Ines;Rashid;Lena;Oscar;Priya;Hugo;Nadia;Felix;Amara;Jonas;Keiko;Pedro;Selma;Victor;Anya;Malik;Clara;Dario;Wendy;Stefan;Lucia;Omar;Greta;Paul;Rosa;Ivan;Tessa;Bruno;Mrs. Adeyemi;Mr. Laurent;Dr. Novak;Aunt Bea;Samir;Kate;Leo;Maya;Ben;Zoe".split(
        ";"
    )
)
PEOPLE = tuple(
    "nurse;teacher;baker;engineer;student;farmer;pilot;librarian;carpenter;journalist;parent of twins;retired sailor;shop owner;scientist;beginner;manager;ten-year-old child;football coach;musician;lawyer".split(
        ";"
    )
)
STYLES = tuple(
    "in a friendly tone; in plain words; in a formal tone; with a little humour; with vivid details; in no more than two paragraphs; as a numbered list; in about 150 words; with one example; step by step; with a surprising ending; for a newspaper".split(
        ";"
    )
)

WRITING = (
    "Write a news article about {topic} in {place}. Quote at least two people.",
    "Write a long and detailed encyclopedia article about {topic}.",
    "Write a news report from {place} about {topic}. Begin with the place and the main event.",
    "Write several informative paragraphs about {topic}: what it is, its history, numbers and dates, and why it matters.",
    "Write a magazine feature about {name}, a {person} from {place}, and {topic}.",
    "Write a factual passage of about 250 words about {topic}, with names, places and years.",
)

CHAT = (
    "Explain {topic} to a {person}{style}.",
    "Write a short story about {name}, a {person} in {place}, and {topic}{style}.",
    "Write a poem about {topic}{style}.",
    "Draft an email from {name} to a {person} about {topic}{style}.",
    "Write a blog post about {topic} and {place}{style}.",
    "What are the advantages and disadvantages of {topic}?",
    "Compare {topic} and {other}{style}.",
    "Give me five ideas for an event about {topic}.",
    "You are a {person} from {place}. Tell me what you think about {topic}.",
    "Act as a {person} and answer my questions. First: why does {topic} matter?",
    "Imagine a conversation between {name} and a {person} about {topic}. Write it down.",
    "What questions would you ask an expert on {topic}?",
    "Write an outline for a presentation on {topic}{style}.",
    "How has {topic} changed over the last hundred years?",
    "Describe a day in the life of a {person} in {place}.",
    "Give me a plan for learning about {topic} in two weeks.",
    "What is the connection between {topic} and {other}?",
    "List the key terms of {topic} with a short definition of each.",
    "Is it true that {topic} is more important than {other}? Give reasons.",
    "Write a product description for a book on {topic}.",
    "Recommend three activities for a {person} who visits {place}.",
    "Discuss how {topic} affects the economy and society.",
    "What are common misconceptions about {topic}?",
    "Write a persuasive speech about {topic}{style}.",
    "Extract the people, places and subjects from this sentence and return them as JSON: {name}, a {person} from {place}, gave a talk about {topic}.",
    "Classify these words as animal, place, person or thing: {place}, {name}, fox, ladder, {person}.",
    "Rewrite this sentence in three different ways: {name} moved to {place} because of {topic}.",
    "Write a Python function that {task}.",
    "Write a Python program that {task} and explain how it works.",
    "How would you write a JavaScript function that {task}?",
    "What is the time complexity of a program that {task}? Explain.",
    "Write a SQL query that lists each {person} in {place} and counts their orders.",
    "Write an HTML page about {topic} with a heading, a list and a picture.",
    "If every {person} in {place} likes tea, and {name} lives in {place} but dislikes tea, can {name} be a {person}? Explain.",
    "{name} is older than {name2}, and {name2} is older than {name3}. Who is the youngest? Explain your reasoning.",
    "What would happen if there were no {person}s in {place}?",
    "Help me with a cover letter: I am a {person}, and I apply for a job in {place}.",
    "What is the role of {topic} in science? Describe an experiment.",
    "Hi! Can you help me with {topic}?",
    "Give me a recipe for a dish from {place} with a shopping list.",
)

TASKS = tuple(
    "finds the largest number in a list;counts the vowels of a string;checks whether a word is a palindrome;merges two sorted lists;reads a CSV file and prints its columns;removes duplicates from a list;computes the factorial of a number;sorts a list of names by length;finds the shortest path in a grid;converts Celsius to Fahrenheit;prints the first n prime numbers;reverses the words of a sentence;implements a stack with two queues;groups words that are anagrams;validates an email address;downloads nothing but counts the lines of all files in a folder;computes the average of each row of a matrix;simulates rolling two dice;binary-searches a sorted list;draws a triangle of stars;counts how often each word occurs;finds two numbers that add up to a target;computes Fibonacci numbers without recursion;keeps a to-do list in a file;checks whether brackets are balanced;rotates a matrix by ninety degrees".split(
        ";"
    )
)

FOLLOW_UPS = (
    "Can you make it shorter?",
    "Explain that again to a {person}.",
    "Give me an example.",
    "Rewrite your answer {style}.",
    "Why is that?",
    "Now write it from the point of view of a {person}.",
    "What are the counterarguments?",
    "Turn your answer into a list of five points.",
    "Which part is the most important?",
    "How does this relate to {topic}?",
    "Are you sure? Check your answer.",
    "Add a title and a closing sentence.",
    "Can you translate the first sentence into Spanish?",
    "What would a {person} say about it?",
    "Go on.",
    "Summarize your answer in one sentence.",
    "Make it more formal.",
    "What are the sources of these claims?",
    "Now do the same for {topic}.",
    "Continue the story.",
    "What should I do first?",
    "Write it again, but set it in {place}.",
)

QUESTIONS = (
    "who wrote the first book about {topic}",
    "when did {topic} become popular",
    "where is {place} located on a map",
    "who invented {thing}",
    "what is {thing} made of",
    "when was {thing} invented",
    "how many people live in {place}",
    "what is the capital of {country}",
    "who is the president of {country}",
    "what is the meaning of the word {thing}",
    "when did {country} become independent",
    "what language do they speak in {country}",
    "what is the longest river in {country}",
    "how long does it take to fly from {place} to {place2}",
    "where does {thing} come from",
    "why is {thing} important",
    "what year did the first {thing} go on sale",
    "who won the world cup in {country}",
    "what is {country} famous for",
    "who sang the song about {thing}",
    "what is the name of the {person} in the film about {topic}",
    "how does {thing} work",
    "what is the difference between {thing} and {thing2}",
    "where was the film about {topic} made",
    "who played the {person} in the series set in {place}",
    "what kind of climate does {country} have",
    "which country produces the most {thing}",
    "who discovered {thing}",
    "when does the new season of the show about {topic} come out",
    "what is the highest mountain in {country}",
    "what are the colours of the flag of {country}",
    "how many states are there in {country}",
    "what is the currency of {country}",
    "who was the first {person} on television",
    "where do {thing} and {thing2} grow or come from",
    "what is the role of a {person} in {topic}",
)
THINGS = tuple(
    "cotton;the telephone;rubber;the bicycle;coffee;steel;the compass;silk;glass;penicillin;the microscope;rice;gold;the piano;chocolate;paper;the steam engine;concrete;olive oil;the zip;copper;wool;the radio;salt;the electric light;cinnamon;gunpowder;the calendar;aspirin;the elevator;porcelain;tea;the umbrella;sugar;natural gas;the barometer;plastic;maize;oxygen;the refrigerator".split(
        ";"
    )
)
COUNTRIES = tuple(
    "Portugal;Kenya;Norway;Peru;Japan;Ghana;Ireland;Vietnam;Canada;Chile;Finland;Morocco;Hungary;New Zealand;Mexico;Iceland;Nepal;Egypt;Austria;Indonesia;Greece;Bolivia;Poland;Turkey;Cuba;Sweden;Nigeria;Thailand;Scotland;Argentina".split(
        ";"
    )
)

READING_QUESTIONS = (
    "What is the main subject of the text?",
    "Who is mentioned in the text?",
    "When did this happen?",
    "Where does it take place?",
    "Why is it important?",
    "What is {thing} according to the text?",
    "what does the text say about history",
    "how many people are involved",
    "what were the consequences",
    "who is responsible for it",
    "what is the origin of the name",
    "what are the main reasons given",
    "which numbers are named and what do they mean",
    "what problem is described",
    "how did it begin",
    "what is the role of the government",
    "what do people think about it",
    "what was the result",
)

# German: (subject, verb finite, its participle with auxiliary, plural?) and parts that combine freely.
GERMAN_SUBJECTS = tuple(
    "Der Bürgermeister;Die Polizei;Ein Sprecher des Unternehmens;Die Ministerin;Der Trainer der Mannschaft;Eine junge Forscherin;Der Vorsitzende des Verbandes;Die Regierung;Ein Lehrer aus {place};Die Feuerwehr;"
    "Der Besitzer des Hotels;Die Universität;Eine Gruppe von Ärzten;Der Sänger;Die Bank;Mein Nachbar;Das Gericht;Der Präsident;Die Gewerkschaft;Ein Kunde;Die Direktorin des Museums;Der Verein;Die Zeitung;Ein Bauer aus der Region;Die Kommission;Der Anwalt der Familie;Das Krankenhaus;Die Stadt".split(
        ";"
    )
)
GERMAN_FRAMES = (
    "{s} hat {t} {o} {v} .",
    "{s} hat angekündigt , {o} {t2} zu {i} .",
    "Nach Angaben der Behörden hat {s1} {t} {o} {v} .",
    "{s} sagte {t} , man wolle {o} so schnell wie möglich {i} .",
    "{t1} hat {s1} {o} {v} , weil {r} .",
    "{s} will {o} {i} , obwohl {r} .",
    "Es ist noch unklar , ob {s1} {o} {i} wird .",
    "{s} hatte {t} {o} {v} , bevor {r2} .",
    "„ Wir werden {o} {i} “ , sagte {n} aus {p} {t} .",
    "{s} , so berichtet eine Zeitung aus {p} , habe {o} {v} .",
    "Wenn {r} , muss {s1} {o} {i} .",
    "{n} ist überzeugt , dass {s1} {o} {i} sollte .",
)
GERMAN_OBJECTS = tuple(
    "den neuen Bahnhof|eröffnet|eröffnen;die alte Brücke|repariert|reparieren;einen Vertrag mit den Nachbarn|unterschrieben|unterschreiben;die Preise für Wasser|erhöht|erhöhen;das Verfahren gegen zwei Männer|eingestellt|einstellen;"
    "mehr Geld für Schulen|gefordert|fordern;den Bericht über die Lage der Wirtschaft|veröffentlicht|veröffentlichen;das Spiel gegen die Nachbarstadt|gewonnen|gewinnen;ein Gesetz zum Schutz der Wälder|beschlossen|beschließen;die Ergebnisse der Studie|vorgestellt|vorstellen;"
    "drei Wohnungen im Zentrum|verkauft|verkaufen;ein Konzert im Park|abgesagt|absagen;die Ursache des Unfalls|untersucht|untersuchen;zehn Mitarbeiter|entlassen|entlassen;einen Preis für ihre Arbeit|erhalten|erhalten;die Straße zum Hafen|gesperrt|sperren;"
    "eine Fabrik für Batterien|gebaut|bauen;das Angebot der Firma|abgelehnt|ablehnen;die Rechte der Mieter|gestärkt|stärken;den Kampf gegen den Hunger|unterstützt|unterstützen;die Pläne der Opposition|kritisiert|kritisieren;einen Brief an alle Bürger|geschrieben|schreiben;"
    "eine Reise nach {place}|geplant|planen;das kleine Theater am Fluss|gerettet|retten;die Zahl der Busse|verringert|verringern;das Bild aus dem Museum|gefunden|finden;die Wahl im nächsten Jahr|verschoben|verschieben;ein Buch über die Geschichte der Stadt|gelesen|lesen".split(
        ";"
    )
)
GERMAN_TIMES = tuple(
    "am Montag;am frühen Morgen;im vergangenen Jahr;vor zwei Wochen;gestern Abend;im Sommer;nach langen Gesprächen;trotz der Kritik;zum ersten Mal seit zehn Jahren;am 3. Mai;im Dezember 2012;ohne Begründung;mit großer Mehrheit;in der Nacht zum Sonntag".split(
        ";"
    )
)
GERMAN_REASONS = tuple(
    "das Geld nicht reicht;die Kosten weiter steigen;niemand damit gerechnet hat;es seit Tagen regnet;viele Menschen dagegen sind;die Zeit knapp wird;die Nachfrage gesunken ist;der Winter früh begonnen hat;es keine Beweise gibt;die Schulen geschlossen bleiben;fast 300 Menschen betroffen sind;die Verhandlungen gescheitert sind".split(
        ";"
    )
)

MATH = (
    "{a} buys {x} {things} for ${y} each and {z} {things2} for ${w} each. How much does {a} spend in total?",
    "{a} has {x} {things}. {b} has {y} times as many. They give away {z} of them. How many {things} do they have left together?",
    "A {job} works {x} hours a day, {y} days a week, and earns ${w} per hour. How much does the {job} earn in {z} weeks?",
    "A train travels {x} miles in {y} hours. At the same speed, how far does it travel in {z} hours?",
    "{a} reads {x} pages on Monday, twice as many on Tuesday and {y} pages on Wednesday. The book has {big} pages. How many pages are left?",
    "There are {big} seats in a theatre. {x}0% of them are taken. How many seats are empty?",
    "{a} bakes {x} trays of {y} cookies. {b} eats {z} of them, and the rest is packed into boxes of {w}. How many full boxes are there?",
    "A shop sells {things} in packs of {x}. {a} needs {big} {things}. How many packs does {a} have to buy, and what do they cost at ${y} per pack?",
    "{a} is {x} years older than {b}. In {y} years the sum of their ages will be {big}. How old is {b} now?",
    "A tank holds {big} liters. It is filled at {x} liters per minute and loses {y} liters per minute. How long until it is full, if it starts with {z} liters?",
    "{a} saves ${x} every week and spends ${y} every month. How much money does {a} have after {z} months of four weeks?",
    "A rectangle is {x} cm wide and {y} cm long. What are its area and its perimeter?",
    "A class of {big} students has {x} more girls than boys. How many girls are in the class?",
    "{a} runs {x} miles on each weekday and {y} miles on each day of the weekend. How many miles does {a} run in {z} weeks?",
    "A jacket costs ${big}. It is reduced by {x}0%, and {a} has a coupon for another ${y}. What does {a} pay?",
    "{a}, {b} and {c} share {big} {things}. {a} takes a half, {b} takes a quarter. How many are left for {c}?",
    "A farm has {x} hens, and every hen lays {y} eggs a week. Eggs are sold at ${z} a dozen. What do {w} weeks bring in?",
    "If {x} {things} cost ${big}, how much do {y} {things} cost?",
    "Solve for n: {x}n + {y} = {big}.",
    "What is {big} divided by {x}, plus {y} times {z}?",
    "{a} drives {big} km. The car needs {x} liters per 100 km, and a liter costs ${y}. What does the fuel cost?",
    "{a} has {x} red, {y} blue and {z} green marbles in a bag. What is the probability that a marble drawn at random is blue?",
)
GOODS = tuple(
    "apples;notebooks;candles;tickets;pencils;bottles of juice;stickers;tulips;muffins;postcards;marbles;chairs;shirts;plates;batteries;bricks;lemons;buttons;toy cars;books".split(
        ";"
    )
)
