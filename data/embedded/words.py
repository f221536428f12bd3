"""Words of the generated corpus.

Most are short and few, so that a byte-level BPE of about a thousand entries holds them in one token: a tiny
target then learns to copy them from the prompt within a million tokens.
"""

NAMES = ["Ada", "Ben", "Dan", "Eva", "Finn", "Ivy", "Kai", "Lena", "Max", "Sam", "Tom", "Zoe"]
CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Accra", "Sofia", "Bonn", "Riga", "Turin"]
ITEMS = [
    "lamp",
    "map",
    "key",
    "cup",
    "book",
    "coin",
    "rope",
    "drum",
    "kite",
    "vase",
    "bell",
    "clock",
    "ring",
    "hat",
    "box",
    "pen",
]
COLORS = ["red", "blue", "green", "gold", "black", "white", "gray", "pink"]
GOODS = ["lamps", "maps", "keys", "cups", "books", "coins", "drums", "kites", "bells", "clocks", "rings", "hats"]
DEEDS = ["hid", "sold", "found", "lost", "took", "made", "saw", "kept"]
LINKS = ["in", "near", "from", "by", "past", "around"]
DAYS = ["Monday", "Tuesday", "Friday", "Sunday"]
FRUITS = ["apples", "pears", "plums", "figs", "lemons", "melons"]

# Code: verbs and nouns make function names; arguments are what a person would call two numbers or a list.
VERBS = ["get", "find", "make", "count", "check", "scale", "mix", "load"]
NOUNS = ["cost", "area", "rate", "score", "size", "speed", "weight", "price", "level", "total"]
ARGUMENTS = ["width", "height", "left", "right", "base", "step", "first", "last", "low", "high"]
LISTS = ["items", "rows", "marks", "prices", "words", "scores"]

# Chat: every slot of a template is one of these; options may hold slots themselves.
CHAT: dict[str, list[str]] = {
    "adj": [
        "small",
        "quiet",
        "big",
        "bright",
        "warm",
        "cold",
        "soft",
        "wild",
        "kind",
        "brave",
        "slow",
        "strange",
        "sweet",
        "dark",
        "tiny",
        "calm",
        "lazy",
        "proud",
        "shy",
    ],
    "animal": ["fox", "bat", "cat", "dog", "bear", "horse", "crow", "frog", "hare", "wolf", "bee", "goat"],
    "place": ["river", "forest", "garden", "tower", "lake", "hill", "mill", "cave", "road", "shop", "yard", "hall"],
    "thing": [
        "lamp",
        "map",
        "key",
        "bell",
        "coin",
        "ring",
        "stone",
        "boat",
        "song",
        "door",
        "seed",
        "star",
        "book",
        "hat",
    ],
    "time": ["morning", "evening", "night", "winter", "summer", "spring", "autumn", "day"],
    "found": ["found", "saw", "lost", "hid", "heard about", "dreamed of", "carried", "drew"],
    "moved": ["walked", "ran", "sailed", "climbed", "wandered", "went", "crept", "raced"],
    "felt": ["felt", "was", "became", "stayed"],
    "mood": ["happy", "sad", "funny", "short", "strange", "quiet", "sweet", "scary"],
    "end": [
        "and slept until the {time}",
        "and sang to the {animal}",
        "and gave the {thing} away",
        "but never told the {animal}",
        "and {felt} {adj} again",
        "while the {animal} laughed",
        "and forgot the {thing}",
        "but the {place} {felt} {adj}",
        "and {moved} back to the {place}",
        "because the {time} {felt} {adj}",
    ],
    "food": ["rice", "beans", "eggs", "corn", "fish", "bread", "plums", "pears"],
    "dish": ["soup", "stew", "salad", "pie", "pasta", "roast"],
    "spice": ["salt", "pepper", "garlic", "honey", "butter", "mint", "chili"],
    "heat": ["fry", "bake", "boil", "roast", "steam", "grill"],
    "feeling": ["tired", "sad", "bored", "lost", "cross", "shy", "stuck", "sick", "lonely"],
    "person": ["friend", "sister", "brother", "mother", "father", "uncle", "aunt", "boss"],
    "hobby": [
        "chess",
        "drawing",
        "running",
        "cooking",
        "reading",
        "sailing",
        "painting",
        "fishing",
        "hiking",
        "singing",
    ],
    "act": [
        "take a {adj} walk by the {place}",
        "call your {person}",
        "drink some {adj} tea",
        "write a {adj} letter to your {person}",
        "try a bit of {hobby}",
        "read a {adj} book",
        "rest until the {time}",
        "cook a {adj} {dish}",
        "visit the {place} with your {person}",
        "listen to a {adj} song",
    ],
    "sorry": ["Sorry to hear that.", "That happens.", "I understand.", "Be kind to yourself.", "It will pass."],
    "maybe": ["You could", "Maybe", "I would", "Perhaps", "First,", "Today,", "Just", "Why not"],
    "then": ["then", "and later", "or", "and", "and maybe", "but first"],
    "gift": [
        "a {adj} {thing}",
        "a {adj} book about {hobby}",
        "a box of {adj} {food}",
        "a {hobby} class",
        "a {adj} trip",
    ],
    "reason": [
        "it makes the {time} feel {adj}",
        "a {person} who likes {hobby} needs it",
        "it is {adj} and {adj}",
        "nobody forgets a {adj} {thing}",
        "every {person} loves a {adj} {thing}",
        "it goes well with {hobby}",
    ],
}
