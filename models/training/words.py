"""Open classes of words: names, places, nouns, codes and text in other scripts, drawn from a seeded generator.

Owns the split of words: `held` decides by a hash alone which words training never sees. Knows no chat.
"""

import hashlib
import random
from collections.abc import Callable


def listed(text: str) -> tuple[str, ...]:
    """Splits a list written as text, at bars if it has any."""
    return tuple(text.split("|") if "|" in text else text.split())


HELD_SHARE = 0.1
"""Share of all words, phrasings and number pairs that only the score may use."""

NAMES = listed(
    "Ana Ben Carla David Elif Farid Greta Hugo Ines Jonas Kira Liam Mona Nils Olga Pavel Quinn Rosa Sven Tara Umar "
    "Vera Wim Xenia Yusuf Zoe Aiko Bruno Chen Dora Emil Fiona Gita Hana Ivan Julia Karl Lena Marco Nina Oskar Petra "
    "Rafael Sofia Theo Uma Viktor Wanda Yara Zeno Maria Mohammed Wei Fatima Ahmed Priya Raj Anjali Arjun Deepak Sunita "
    "Kenji Yuki Sakura Haruto Min Jun Seo Hyun Linh Nguyen Thu Somchai Malee Budi Siti Agus Dewi Kwame Ama Kofi Abena "
    "Chidi Ngozi Amara Tunde Zainab Omar Layla Hassan Aisha Karim Salma Tariq Noor Dmitri Svetlana Natasha Boris Irina "
    "Giovanni Luca Chiara Francesca Pierre Marie Jean Camille Antoine Hans Ingrid Lars Astrid Bjorn Freya Magnus Sigrid "
    "Pedro Juan Carlos Lucia Isabel Diego Valentina Mateo Camila Joao Ricardo Beatriz Thiago Alice Bob Charlie Daniel "
    "Emma Frank Grace Henry Isla Jack Kate Leo Mia Noah Olivia Peter Rachel Sam Thomas Ursula Vincent William Xavier "
    "Anna Ella Eva Max Paul Tom Tim Kim Lee Amy Joe Ian Eli Ada Ida Alan Grete Linus Guido Margaret Dennis Barbara "
    "Agnieszka Katarzyna Tomasz Wojciech Zsofia Laszlo Ilona Mihai Andreea Nikos Eleni Dimitris Mehmet Ayse Emre Zeynep "
    "Aziz Gulnara Tamar Giorgi Aram Ani Levan Bat Sarnai Temuulen Aroha Wiremu Keola Leilani Nanook Aputi"
)
ACCENTED_NAMES = listed(
    "José André Zoë François Jürgen Björn Søren Åsa Łukasz Małgorzata Jiří Šárka Đorđe Ñusta Renée Chloé Göran Özgür "
    "Işıl Ștefan Żaneta Ágnes Íris Óscar Úna Çağla 日和 陽翔 小明 王芳 민준 서연 Иван Ольга Мария Νίκος Ελένη محمد ليلى "  # noqa: RUF001
    "דוד נועה अर्जुन प्रिया สมชาย"
)
PLACES = listed(
    "Oslo Lima Rome Cairo Delhi Tokyo Paris Berlin Madrid Vienna Lisbon Dublin Prague Athens Seoul Quito Accra Tunis "
    "Riga Bern Havana Nairobi Sydney Toronto Boston Denver Austin Seattle Geneva Munich London Chicago Dallas Miami "
    "Portland Milan Naples Turin Venice Lyon Nice Bonn Kyoto Osaka Busan Hanoi Manila Jakarta Bangkok Mumbai Chennai "
    "Karachi Lahore Dhaka Tehran Baghdad Ankara Izmir Warsaw Krakow Gdansk Vilnius Tallinn Helsinki Stockholm Bergen "
    "Aarhus Hamburg Cologne Leipzig Zagreb Split Sofia Varna Lagos Dakar Rabat Fez Kigali Harare Durban Perth Hobart "
    "Auckland Suva Apia Bogota Cali Caracas Santiago Cusco Recife Salvador Montreal Ottawa Calgary Halifax Phoenix "
    "Houston Memphis Atlanta Reno Boise Fargo Omaha Tulsa Utrecht Ghent Bruges Antwerp Malmo Turku Tromso Bilbao Porto"
)
TWO_WORD_PLACES = listed(
    "New York|San Francisco|Los Angeles|New Delhi|Hong Kong|Buenos Aires|Cape Town|Addis Ababa|Kuala Lumpur|"
    "Rio de Janeiro|São Paulo|Mexico City|Salt Lake City|Tel Aviv|Santa Fe|Las Vegas|San Diego|Den Haag|Zürich|Malmö|"
    "Kraków|Reykjavík|Córdoba|Besançon|東京|北京|서울|Москва|Αθήνα"
)
NOUNS = listed(
    "apple river stone cloud tiger piano lamp forest bridge coffee window garden silver rocket pepper candle harbor "
    "violin meadow pencil table chair mirror basket bottle button camera carpet castle cherry circle copper corner "
    "cotton desert dragon engine feather finger flower guitar hammer helmet island jacket kettle ladder lemon letter "
    "magnet marble market mountain needle onion orange parrot pillow planet pocket potato puzzle rabbit ribbon saddle "
    "sailor salmon scarf shadow shell signal spider spoon spring square station summer sunset thunder ticket tomato "
    "tower tractor tunnel turtle valley velvet village walnut wagon whale winter wizard yogurt zebra anchor autumn "
    "badge bakery balloon bamboo banana barrel beach bell berry bicycle blanket boat book box brick broom bucket cabin "
    "cactus cake canyon card cave chalk cheese chess clay clock coat coin comet compass cookie crab crown cup curtain "
    "daisy deer desk diamond doll door drum eagle egg elbow falcon farm fern field fig flag flute fog fork fox frog "
    "glass globe glove goat gold goose grape grass hat hill honey horse ink ivory jar jewel juice key kite knot lake "
    "leaf lily lion lizard lock maple mask milk mint moss mouse net nest nut oak oar olive owl paint palm panda paper "
    "peach pear pearl pen pine plum pond pony pot prism quilt radio rain raven reef rice ring road roof root rope rose "
    "ruby sand seed sheep ship shoe silk snail snow soap sock soup star steam straw sugar swan tea tent toast train "
    "tree trout tulip vase vest wave well wheat wheel wind wing wolf wood wool yarn"
)
ADJECTIVES = listed(
    "old new small large quiet loud red blue green bright dark warm cold slow quick soft hard wet dry young early late "
    "heavy light empty full round flat wide narrow deep calm gentle wild clean dusty fresh plain simple strange sweet"
)
COLORS = listed(
    "red blue green yellow purple orange pink brown black white gray teal violet gold silver indigo"
)
EMOJI = listed("🙂 🚀 🌊 🐍 🦀 ☕ ⭐ 🍎 🎲 🐟 🌍 🔥 ❄️ 🌈")
SCRIPTS = (
    "àáâãäåçèéêëìíîïñòóôõöøùúûüýÿšžčćđłńśźżğışțăőű",
    "абвгдежзийклмнопрстуфхцчшщыэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "日月火水木金土山川田人口手足目耳花草虫魚鳥犬猫東西南北大小中上下",
    "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほ",
    "가나다라마바사아자차카타파하",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهوي",
)
BLOCKS = (
    (0xA1, 0x24F),
    (0x370, 0x7FF),
    (0x900, 0x1FFF),
    (0x3041, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1FAFF),
    (0x20000, 0x2A6DF),
)
ONSETS = listed(
    "b c d f g h j k l m n p r s t v w y z br ch cl cr dr fl fr gl gr kl kr pl pr sh sk sl sn st th tr"
)
VOWELS = listed("a e i o u a e i o u ai ea ia io ou")
CODAS = ["", "", "", "", "n", "r", "l", "s", "m", "t", "k", "x", "nd", "rt", "sh"]


def held(text: str) -> bool:
    """Says whether `text` (a word, a phrasing, a pair of numbers) belongs to the score and not to training."""
    digest = hashlib.sha256(text.lower().encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_SHARE * 2**32


def syllables(rng: random.Random, low: int, high: int) -> str:
    """Returns a made-up lower-case word of `low` to `high` syllables."""
    return "".join(
        rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
        for _ in range(rng.randint(low, high))
    )


def foreign(rng: random.Random) -> str:
    """Returns two to six letters of one script other than plain Latin."""
    count = rng.randint(2, 6)
    if rng.random() < 0.25:  # any character at all, so that every byte is met
        low, high = rng.choice(BLOCKS)
        return "".join(chr(rng.randint(low, high)) for _ in range(count))
    script = rng.choice(SCRIPTS)
    return "".join(rng.choice(script) for _ in range(count))


def code(rng: random.Random) -> str:
    """Returns a short random key such as `KEY-ab12` or `7f3x9`."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    alphabet = rng.choice([letters, letters.upper(), letters + "0123456789", "0123456789abcdef"])
    body = "".join(rng.choice(alphabet) for _ in range(rng.randint(3, 8)))
    prefix = rng.choice(
        ["", "", "KEY-", "key-", "id_", "A-", "ref:", "X", syllables(rng, 1, 1) + "-"]
    )
    tail = rng.choice(["", "", "", "-" + str(rng.randint(0, 99)), "_" + str(rng.randint(0, 999))])
    return prefix + body + tail


class Words:
    """Draws words from one side of the split: `score=True` gives only held-out ones, else only the others."""

    def __init__(self, rng: random.Random, score: bool, longest: int = 3) -> None:
        self.rng = rng
        self.score = score
        self.longest = longest

    def made(self, low: int, high: int) -> str:
        """Returns a made-up word of `low` to `high` syllables, but never more than `longest`."""
        return syllables(self.rng, min(low, self.longest), min(high, self.longest))

    def keep(self, draw: Callable[[], str]) -> str:
        """Draws until the word lies on this side of the split."""
        while held(word := draw()) != self.score:
            pass
        return word

    def name(self) -> str:
        """Returns a person's name: real, made up, or in another script."""
        return self.keep(self._name)

    def place(self) -> str:
        """Returns a city's name, sometimes of two words."""
        return self.keep(self._place)

    def noun(self) -> str:
        """Returns a lower-case noun, real or made up."""
        return self.keep(self._noun)

    def phrase(self, low: int = 1, high: int = 3) -> str:
        """Returns `low` to `high` open words, as in a search query or a short message."""
        return " ".join(self.noun() for _ in range(self.rng.randint(low, high)))

    def ticker(self) -> str:
        """Returns a stock symbol or a company's name."""
        return self.keep(self._ticker)

    def code(self) -> str:
        """Returns a short random key."""
        return self.keep(lambda: code(self.rng))

    def foreign(self) -> str:
        """Returns a short word in another script, or an emoji."""
        rng = self.rng
        return self.keep(
            lambda: foreign(rng) if rng.random() < 0.85 else foreign(rng) + rng.choice(EMOJI)
        )

    def numbers(self, top: int) -> tuple[int, int]:
        """Returns a pair of numbers up to `top`, small ones more often; the pair is what the split is about."""
        rng = self.rng
        while True:
            reach = rng.choice([9, 20, top, top])
            pair = rng.randint(0, reach), rng.randint(0, rng.choice([reach, reach, 9]))
            if rng.random() < 0.2:
                pair = pair[1], pair[0]
            if held(f"{pair[0]} {pair[1]}") == self.score:
                return pair

    def number(self, top: int) -> int:
        """Returns one number up to `top`."""
        return int(self.keep(lambda: str(self.rng.randint(0, self.rng.choice([9, 99, top])))))

    def sentence(self) -> str:
        """Returns a filler sentence about nothing in particular."""
        rng = self.rng
        a, b = rng.choice(ADJECTIVES), rng.choice(ADJECTIVES)
        x, y, z = (rng.choice(NOUNS) for _ in range(3))
        return rng.choice(
            [
                f"The {a} {x} is near the {b} {y}.",
                f"A {x} and a {y} were on the {a} {z}.",
                f"Today I saw a {a} {x} with a {y}.",
                f"The {x} was {a} and the {y} was {b}.",
                f"I put the {x} under the {a} {y}.",
                f"Every {x} needs a {a} {y}.",
                f"My {x} is {a}, but my {y} is {b}.",
                f"We walked past the {x}, the {y} and the {z}.",
                f"There is a {a} {x} in the {y}.",
            ]
        )

    def _name(self) -> str:
        roll = self.rng.random()
        if roll < 0.35:
            return self.rng.choice(NAMES)
        if roll < 0.41:
            return self.rng.choice(ACCENTED_NAMES)
        made = self.made(1, 3)
        if roll < 0.46:
            return made + foreign(self.rng)[:2]
        if roll < 0.52:
            return f"{made} {self.made(1, 3)}".title()
        return made if roll < 0.58 else made.title()

    def _place(self) -> str:
        roll = self.rng.random()
        if roll < 0.3:
            return self.rng.choice(PLACES)
        if roll < 0.4:
            return self.rng.choice(TWO_WORD_PLACES)
        made = self.made(2, 3)
        if roll < 0.45:
            return f"{made} {self.made(1, 2)}".title()
        if roll < 0.5:
            return f"{self.rng.choice(['New', 'San', 'Port', 'Saint', 'North'])} {made.title()}"
        return made if roll < 0.6 else made.title()

    def _noun(self) -> str:
        return self.rng.choice(NOUNS) if self.rng.random() < 0.5 else self.made(1, 3)

    def _ticker(self) -> str:
        rng = self.rng
        if rng.random() < 0.5:
            return "".join(
                rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 5))
            )
        return self.made(1, 3).title()
