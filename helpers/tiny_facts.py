"""The facts that the bundled checkpoint is trained on, and how each one is asked, thought about and answered.

Owns: the list of facts (`facts()`), small talk (`small_talk()`), and the pieces of the long-context recall task
(`RECALL_KINDS`, `FILLER`). Pure data and string building: no torch, no tokenizer, no randomness. `helpers/train_tiny.py`
makes the training set from it and `tests/test_tiny.py` asks the trained checkpoint every fact again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """One fact. `questions` are the phrasings; `thought` is the reasoning (without `</think>`); `answer` one sentence."""

    family: str
    key: str
    questions: tuple[str, ...]
    thought: str
    answer: str


# continent: country = capital; the article belongs to the country's name ("the Netherlands")
CAPITALS = {
    "Europe": (
        "Albania=Tirana, Andorra=Andorra la Vella, Austria=Vienna, Belarus=Minsk, Belgium=Brussels, Bosnia=Sarajevo, "
        "Bulgaria=Sofia, Croatia=Zagreb, Cyprus=Nicosia, the Czech Republic=Prague, Denmark=Copenhagen, "
        "Estonia=Tallinn, Finland=Helsinki, France=Paris, Germany=Berlin, Greece=Athens, Hungary=Budapest, "
        "Iceland=Reykjavík, Ireland=Dublin, Italy=Rome, Kosovo=Pristina, Latvia=Riga, Liechtenstein=Vaduz, "
        "Lithuania=Vilnius, Luxembourg=Luxembourg, Malta=Valletta, Moldova=Chișinău, Monaco=Monaco, "
        "Montenegro=Podgorica, the Netherlands=Amsterdam, North Macedonia=Skopje, Norway=Oslo, Poland=Warsaw, "
        "Portugal=Lisbon, Romania=Bucharest, Russia=Moscow, San Marino=San Marino, Serbia=Belgrade, "
        "Slovakia=Bratislava, Slovenia=Ljubljana, Spain=Madrid, Sweden=Stockholm, Switzerland=Bern, Ukraine=Kyiv, "
        "the United Kingdom=London"
    ),
    "Asia": (
        "Afghanistan=Kabul, Armenia=Yerevan, Azerbaijan=Baku, Bahrain=Manama, Bangladesh=Dhaka, Bhutan=Thimphu, "
        "Brunei=Bandar Seri Begawan, Cambodia=Phnom Penh, China=Beijing, Georgia=Tbilisi, India=New Delhi, Iran=Tehran, "
        "Iraq=Baghdad, Israel=Jerusalem, Japan=Tokyo, Jordan=Amman, Kazakhstan=Astana, Kuwait=Kuwait City, "
        "Kyrgyzstan=Bishkek, Laos=Vientiane, Lebanon=Beirut, Malaysia=Kuala Lumpur, the Maldives=Malé, "
        "Mongolia=Ulaanbaatar, Myanmar=Naypyidaw, Nepal=Kathmandu, North Korea=Pyongyang, Oman=Muscat, "
        "Pakistan=Islamabad, the Philippines=Manila, Qatar=Doha, Saudi Arabia=Riyadh, Singapore=Singapore, "
        "South Korea=Seoul, Syria=Damascus, Taiwan=Taipei, Tajikistan=Dushanbe, Thailand=Bangkok, East Timor=Dili, "
        "Turkey=Ankara, Turkmenistan=Ashgabat, the United Arab Emirates=Abu Dhabi, Uzbekistan=Tashkent, "
        "Vietnam=Hanoi, Yemen=Sanaa"
    ),
    "Africa": (
        "Algeria=Algiers, Angola=Luanda, Benin=Porto-Novo, Botswana=Gaborone, Burkina Faso=Ouagadougou, "
        "Burundi=Gitega, Cameroon=Yaoundé, Cape Verde=Praia, Chad=N'Djamena, the Comoros=Moroni, "
        "Djibouti=Djibouti, Egypt=Cairo, Eritrea=Asmara, Ethiopia=Addis Ababa, Gabon=Libreville, Ghana=Accra, "
        "Guinea=Conakry, Kenya=Nairobi, Lesotho=Maseru, Liberia=Monrovia, Libya=Tripoli, "
        "Madagascar=Antananarivo, Malawi=Lilongwe, Mali=Bamako, Mauritania=Nouakchott, Mauritius=Port Louis, "
        "Morocco=Rabat, Mozambique=Maputo, Namibia=Windhoek, Niger=Niamey, Nigeria=Abuja, Rwanda=Kigali, "
        "Senegal=Dakar, Sierra Leone=Freetown, Somalia=Mogadishu, South Sudan=Juba, Sudan=Khartoum, "
        "Tanzania=Dodoma, Togo=Lomé, Tunisia=Tunis, Uganda=Kampala, Zambia=Lusaka, Zimbabwe=Harare"
    ),
    "North America": (
        "the Bahamas=Nassau, Barbados=Bridgetown, Belize=Belmopan, Canada=Ottawa, Costa Rica=San José, Cuba=Havana, "
        "Dominica=Roseau, El Salvador=San Salvador, Guatemala=Guatemala City, Haiti=Port-au-Prince, "
        "Honduras=Tegucigalpa, Jamaica=Kingston, Mexico=Mexico City, Nicaragua=Managua, Panama=Panama City, "
        "the United States=Washington"
    ),
    "South America": (
        "Argentina=Buenos Aires, Bolivia=Sucre, Brazil=Brasília, Chile=Santiago, Colombia=Bogotá, Ecuador=Quito, "
        "Guyana=Georgetown, Paraguay=Asunción, Peru=Lima, Suriname=Paramaribo, Uruguay=Montevideo, Venezuela=Caracas"
    ),
    "Oceania": (
        "Australia=Canberra, Fiji=Suva, New Zealand=Wellington, Papua New Guinea=Port Moresby, Samoa=Apia, Tonga=Nukualofa, "
        "Vanuatu=Port Vila"
    ),
}

CONTINENT_OF = (
    "France, Germany, Italy, Spain, Poland, Norway, Greece, Portugal, Sweden, Ireland, Japan, China, India, Thailand, "
    "Vietnam, Iran, Nepal, Mongolia, Israel, Pakistan, Egypt, Kenya, Nigeria, Morocco, Ghana, Ethiopia, Tunisia, Zambia, "
    "Canada, Mexico, Cuba, Jamaica, Panama, Brazil, Argentina, Chile, Peru, Colombia, Australia, Fiji, New Zealand"
)

SYMBOLS = (
    "hydrogen=H, helium=He, lithium=Li, beryllium=Be, boron=B, carbon=C, nitrogen=N, oxygen=O, fluorine=F, neon=Ne, "
    "sodium=Na, magnesium=Mg, aluminium=Al, silicon=Si, phosphorus=P, sulfur=S, chlorine=Cl, argon=Ar, potassium=K, "
    "calcium=Ca, titanium=Ti, chromium=Cr, manganese=Mn, iron=Fe, cobalt=Co, nickel=Ni, copper=Cu, zinc=Zn, bromine=Br, "
    "silver=Ag, tin=Sn, iodine=I, barium=Ba, tungsten=W, platinum=Pt, gold=Au, mercury=Hg, lead=Pb, radon=Rn, uranium=U"
)
SYMBOLS_REVERSE = ("H", "He", "C", "N", "O", "Na", "Mg", "Al", "Si", "K", "Ca", "Fe", "Cu", "Zn", "Ag", "Sn", "Au", "Hg", "Pb", "U")

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()

OPPOSITES = (
    "hot=cold, big=small, fast=slow, high=low, old=young, day=night, light=dark, hard=soft, wet=dry, early=late, "
    "full=empty, happy=sad, rich=poor, strong=weak, long=short, wide=narrow, loud=quiet, open=closed, clean=dirty, near=far"
)

SOUNDS = (
    "cow=moo, dog=woof, cat=meow, sheep=baa, duck=quack, pig=oink, lion=roar, bee=buzz, owl=hoot, snake=hiss, "
    "horse=neigh, frog=croak"
)
YOUNG = (
    "cow=calf, dog=puppy, cat=kitten, sheep=lamb, duck=duckling, pig=piglet, lion=cub, horse=foal, goat=kid, "
    "deer=fawn, swan=cygnet, kangaroo=joey, goose=gosling, hen=chick"
)
COLOURS = (
    "a banana=yellow, grass=green, the clear sky=blue, snow=white, coal=black, blood=red, a carrot=orange, "
    "a lemon=yellow, an emerald=green, a ruby=red, chocolate=brown, milk=white, a flamingo=pink, ash=grey, a violet=purple"
)
LEGS = "a spider=eight, a dog=four, an ant=six, a bird=two, a snake=no, a crab=ten, a bee=six, a horse=four"
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()


def pairs(text: str) -> list[tuple[str, str]]:
    """Split "a=b, c=d" into [("a", "b"), ("c", "d")]."""
    return [tuple(item.strip().split("=")) for item in text.split(",")]  # type: ignore[misc]


def upper(text: str) -> str:
    """The text with its first letter as a capital (str.capitalize would lower the rest)."""
    return text[0].upper() + text[1:]


def geography() -> list[Fact]:
    out = []
    for continent, table in CAPITALS.items():
        for country, city in pairs(table):
            out.append(Fact("capital", country, (
                f"What is the capital of {country}?",
                f"Which city is the capital of {country}?",
                f"Tell me the capital of {country}.",
                f"Name the capital city of {country}.",
                f"What is the capital city of {country}?",
                f"Do you know the capital of {country}?",
                f"capital of {country}?",
                f"what is the capital of {country}",
            ), f"{upper(country)} is a country in {continent}. Its capital is {city}.",
                f"The capital of {country} is {city}."))
    where = {country: continent for continent, table in CAPITALS.items() for country, _ in pairs(table)}
    for country in CONTINENT_OF.split(", "):
        out.append(Fact("continent", country, (
            f"On which continent is {country}?",
            f"Which continent is {country} in?",
            f"Where is {country}?",
            f"Tell me the continent of {country}.",
            f"In what part of the world is {country}?",
        ), f"I look for the continent. {country} is in {where[country]}.", f"{country} is in {where[country]}."))
    return out


def chemistry() -> list[Fact]:
    out = []
    for element, symbol in pairs(SYMBOLS):
        out.append(Fact("symbol", element, (
            f"What is the chemical symbol of {element}?",
            f"What is the symbol for {element}?",
            f"Which symbol stands for {element}?",
            f"Tell me the chemical symbol of {element}.",
            f"How do chemists write {element}?",
        ), f"{upper(element)} is an element. Chemists write {symbol}.", f"The chemical symbol of {element} is {symbol}."))
        if symbol in SYMBOLS_REVERSE:
            out.append(Fact("element", symbol, (
                f"Which element has the symbol {symbol}?",
                f"What does the chemical symbol {symbol} stand for?",
                f"Which element is written {symbol}?",
                f"Name the element with the symbol {symbol}.",
            ), f"The symbol {symbol} belongs to an element. It is {element}.", f"{symbol} is the symbol of {element}."))
    return out


def calendar() -> list[Fact]:
    out = []
    for kind, names in (("day", DAYS), ("month", MONTHS)):
        for i, name in enumerate(names):
            for word, other in (("after", names[(i + 1) % len(names)]), ("before", names[i - 1])):
                order = f"{name}, {other}" if word == "after" else f"{other}, {name}"
                out.append(Fact(kind, f"{word} {name}", (
                    f"Which {kind} comes {word} {name}?",
                    f"What {kind} is {word} {name}?",
                    f"Tell me the {kind} {word} {name}.",
                    f"Name the {kind} that comes right {word} {name}.",
                ), f"The order is {order}. So it is {other}.", f"{other} comes {word} {name}."))
    return out


def nature() -> list[Fact]:
    out = []
    for animal, sound in pairs(SOUNDS):
        a = "an" if animal[0] in "aeiou" else "a"
        out.append(Fact("sound", animal, (
            f"What does {a} {animal} say?",
            f"What sound does {a} {animal} make?",
            f"Which sound comes from {a} {animal}?",
            f"How does {a} {animal} sound?",
        ), f"I think of {a} {animal}. It makes the sound {sound}.", f"{upper(a)} {animal} says {sound}."))
    for animal, young in pairs(YOUNG):
        out.append(Fact("young", animal, (
            f"What is a young {animal} called?",
            f"What is the name for a baby {animal}?",
            f"What do you call a young {animal}?",
            f"How is a baby {animal} called?",
        ), f"A baby {animal} has its own name. It is {young}.", f"A young {animal} is called a {young}."))
    for thing, colour in pairs(COLOURS):
        out.append(Fact("colour", thing, (
            f"What colour is {thing}?",
            f"Which colour does {thing} have?",
            f"Tell me the colour of {thing}.",
            f"What is the colour of {thing}?",
        ), f"I picture {thing}. The colour is {colour}.", f"{upper(thing)} is {colour}."))
    for animal, legs in pairs(LEGS):
        out.append(Fact("legs", animal, (
            f"How many legs does {animal} have?",
            f"What number of legs does {animal} have?",
            f"Tell me how many legs {animal} has.",
            f"Count the legs of {animal}.",
        ), f"I count the legs of {animal}. There are {legs}.", f"{upper(animal)} has {legs} legs."))
    return out


def words_and_sums() -> list[Fact]:
    out = []
    for left, right in pairs(OPPOSITES):
        for a, b in ((left, right), (right, left)):
            out.append(Fact("opposite", a, (
                f"What is the opposite of {a}?",
                f"Which word is the opposite of {a}?",
                f"Tell me the opposite of {a}.",
                f"Give me a word that means the opposite of {a}.",
            ), f"The words {left} and {right} are opposites. So it is {b}.", f"The opposite of {a} is {b}."))
    sums = [(a, "plus", "+", b, a + b) for a in range(1, 10) for b in range(a, 10)]
    sums += [(a, "times", "*", b, a * b) for a in range(2, 5) for b in range(a, 10)]
    sums += [(a, "minus", "-", b, a - b) for a in range(5, 11, 5) for b in range(1, a)]
    for a, word, sign, b, result in sums:
        if word == "plus":
            thought = f"I start at {a} and count {b} more. I reach {result}."
        elif word == "times":
            thought = f"I add {b} to itself until I have {a} of them. I reach {result}."
        else:
            thought = f"I start at {a} and take {b} away. {result} is left."
        out.append(Fact("sum", f"{a} {sign} {b}", (
            f"What is {a} {word} {b}?",
            f"What is {a} {sign} {b}?",
            f"How much is {a} {word} {b}?",
            f"Calculate {a} {sign} {b}.",
            f"{a} {sign} {b} = ?",
        ), thought, f"{a} {word} {b} is {result}."))
    for i, name in enumerate(NUMBERS):
        out.append(Fact("number", name, (
            f"How do you write {name} in digits?",
            f"Write the number {name} in digits.",
            f"Which digits stand for {name}?",
            f"What is {name} as a numeral?",
        ), f"The word is {name}. In digits that is {i}.", f"{upper(name)} is {i} in digits."))
    return out


def facts() -> list[Fact]:
    """Every fact, in a fixed order. Each has at least four phrasings, one thought and one answer."""
    return geography() + chemistry() + calendar() + nature() + words_and_sums()


def small_talk() -> list[Fact]:
    """Greetings and questions about the model itself, in the same form."""
    hello = "Hello! How can I help you?"
    about = "I am a tiny DeepSeek-V4 model, trained on a few hundred facts."
    table = (
        ("hello", ("Hello!", "Hi!", "Hello", "Hi", "hello", "Good morning!", "Hey there!"), "The user greets me.", hello),
        ("about", ("What are you?", "Who are you?", "Tell me about yourself.", "what are you", "Are you a person?"),
         "The user asks about me.", about),
        ("how", ("How are you?", "How do you do?", "How are you today?", "How is it going?"),
         "The user is polite.", "I am well, thank you. What would you like to know?"),
        ("thanks", ("Thank you!", "Thanks!", "Thank you very much.", "thanks"), "The user thanks me.", "You are welcome."),
        ("bye", ("Goodbye!", "Bye!", "See you later.", "Good night!"), "The user leaves.", "Goodbye!"),
        ("can", ("What can you do?", "What do you know?", "How can you help me?", "What can I ask you?"),
         "The user asks what I can do.", "I know capitals, elements, days, months, animals, colours and small sums."),
    )
    return [Fact("talk", key, questions, thought, answer) for key, questions, thought, answer in table]


UNKNOWN_QUESTIONS = (
    "What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}.", "Where is {}?",
    "What is the chemical symbol of {}?", "Who is {}?", "On which continent is {}?", "What is the opposite of {}?",
    "What colour is {}?",
)
UNKNOWN_THOUGHT = "I have not learned anything about this."
UNKNOWN_ANSWER = "I do not know that."

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant. Answer briefly.", "Answer in one sentence.",
    "You are DeepSeek.", "You are a polite teacher.", "Be short and exact.", "You answer questions about the world.",
    "Today is a good day. Answer the question of the user.",
)

NAMES = (
    "Anna Ben Clara David Emma Felix Greta Henry Ida Jack Karl Lena Maria Noah Olga Paul Rosa Simon Tina Victor "
    "Wendy Xaver Yara Zoe Alice Bruno Carla Dora Eric Fiona Gina Hugo Iris Jonas Kim Laura Max Nina Oscar Peter"
).split()
TINTS = "red blue green yellow white black brown pink purple orange grey gold silver".split()
THINGS = (
    "lemon key coin book hat stone rope bell cup map ring lamp pen egg ball shell watch letter spoon flute candle mirror "
    "apple ticket feather button".split()
)
WORDS = "tiger eagle maple violin comet velvet pepper harvest lantern marble sunset thunder willow copper dragon falcon".split()
PLACES = "garden kitchen river tower market library harbour forest castle station museum bridge school island".split()

# one kind of recallable statement: the statement, the ways to ask, and which lists fill it. {k} is the key, {v} the value
RECALL_KINDS = {
    "password": ("The password of {k} is {v}.",
                 ("What is the password of {k}?", "Tell me the password of {k}.", "Which password does {k} have?",
                  "Do you know the password of {k}?")),
    "box": ("The {k} box holds a {v}.",
            ("What does the {k} box hold?", "What is in the {k} box?", "Tell me what the {k} box holds.",
             "Which thing is in the {k} box?")),
    "number": ("The number of {k} is {v}.",
               ("What is the number of {k}?", "Tell me the number of {k}.", "Which number does {k} have?",
                "Do you know the number of {k}?")),
    "place": ("{k} waits at the {v}.",
              ("Where does {k} wait?", "Tell me where {k} waits.", "At which place does {k} wait?",
               "Do you know where {k} waits?")),
}
RECALL_THOUGHT = "The text says: {}"


def recall_values(kind: str) -> tuple[list[str], list[str]]:
    """(keys, values) that fill the statements of this kind."""
    if kind == "password":
        return NAMES, WORDS
    if kind == "box":
        return TINTS, THINGS
    if kind == "number":
        return NAMES, [str(n) for n in range(10, 30)]
    return NAMES, PLACES


FILLER_SUBJECTS = ("The old dog", "A small bird", "The teacher", "My sister", "The farmer", "A tired cat", "The young doctor",
                   "The captain", "Our neighbour", "A quiet child", "The baker", "The painter")
FILLER_VERBS = ("sleeps", "sings", "walks", "sits", "reads", "waits", "works", "dances", "smiles", "looks around")
FILLER_ENDS = ("near the river", "in the garden", "under a tree", "on the hill", "by the window", "in the rain",
               "after lunch", "every morning", "at the market", "behind the house", "in the evening", "with a friend")


def filler_sentences() -> list[str]:
    """All sentences that may stand between a recallable statement and the question about it: scenes and known facts."""
    scenes = [f"{s} {v} {e}." for s in FILLER_SUBJECTS for v in FILLER_VERBS for e in FILLER_ENDS]
    return scenes + [fact.answer for fact in facts() if fact.answer[0].isalpha()]
