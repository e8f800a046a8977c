"""How things are asked: phrasings with slots for open words, and the parts that vary around them.

Owns the composition of a phrasing and its side of the split. What is answered is in `facts` and `corpus`.
"""

import random
from itertools import pairwise

from models.training.words import held, listed

ABOUT = (
    "What is {x}?", "What's {x}?", "What are {x}?", "Tell me about {x}.", "Explain {x}.", "Describe {x}.",
    "What do you know about {x}?", "Can you explain {x}?", "Could you tell me about {x}?", "I want to know about {x}.",
    "Give me some information about {x}.", "How would you describe {x}?", "{x}?", "Say something about {x}.",
    "Teach me about {x}.", "I would like to learn about {x}.", "Help me understand {x}.", "What can you say about {x}?",
    "Do you know what {x} is?", "Define {x}.", "Explain to me what {x} is.", "What exactly is {x}?", "What about {x}?",
    "Have you heard of {x}?", "Let's talk about {x}.", "Tell me what you know about {x}.", "Can you describe {x}?",
    "I have a question about {x}.", "Explain {x} to me.", "Would you explain {x}?", "What is meant by {x}?",
)  # fmt: skip
PARAGRAPH = (
    "Write a short paragraph about {x}.", "Write a paragraph about {x}.", "Write a few sentences about {x}.",
    "Write three sentences about {x}.", "Give me a paragraph about {x}.", "A short paragraph about {x}, please.",
    "Please write a small text about {x}.", "Can you write a paragraph about {x}?", "Tell me everything about {x}.",
    "Write a short text about {x}.", "Explain {x} in detail.", "Describe {x} in a paragraph.", "Describe {x} in three sentences.",
    "Tell me more about {x}.", "I need a paragraph about {x}.", "Write something longer about {x}.",
)  # fmt: skip
ONE = (
    "Answer in one sentence.", "One sentence.", "In one sentence, please.", "Keep it to one sentence.", "Be brief.",
    "Use only one sentence.", "Just one sentence.", "One sentence, please.", "Make it short.", "Reply in a single sentence.",
    "Use one sentence.", "Answer briefly.", "In one sentence.", "Keep it short.", "A single sentence is enough.",
)  # fmt: skip
TWO = (
    "Answer in two sentences.", "Two sentences.", "In two sentences, please.", "Use two sentences.", "Two sentences, please.",
    "Keep it to two sentences.", "Write two sentences.", "Just two sentences.", "Reply with two sentences.",
    "In two sentences.", "Use exactly two sentences.", "Make it two sentences.",
)  # fmt: skip
ONE_BEFORE = (
    "In one sentence: {q}",
    "In one sentence, {q}",
    "Briefly: {q}",
    "One sentence only. {q}",
    "In short, {q}",
)
TWO_BEFORE = (
    "In two sentences: {q}",
    "In two sentences, {q}",
    "Two sentences only. {q}",
    "With two sentences: {q}",
)
SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "You are an assistant.", "Be helpful.", "Be polite.",
    "You are a helpful, honest and harmless assistant.", "You are Gemma, a helpful assistant.", "Answer the user's questions.",
    "You are a support agent for this server.", "Help the user.", "You are a concise assistant.", "Use the tools when needed.",
    "You are an expert in machine learning.", "You are a helpful AI assistant. Answer truthfully.", "Speak English.",
    "You are a chat bot.", "Respond in plain text.", "You have access to tools.", "You are a careful assistant that thinks first.",
    "Today is Monday.", "Do not use markdown.", "You help people with their work.", "You are a coding assistant.",
)  # fmt: skip
SYSTEM_ONE = ("Answer in one sentence.", "Always answer in one sentence.", "Use one sentence only.", "Keep your answers to one sentence.")  # fmt: skip
OPENINGS = (
    "", "", "", "", "", "", "", "Please tell me: ", "Hi! ", "Hello, ", "Hey, ", "Quick question: ", "One more thing: ",
    "Ok, ", "So, ", "Now, ", "Good morning! ", "Well, ", "Next: ", "A question: ", "Sorry, ", "Hi there, ", "And ",
    "Thanks. ", "Great. ", "Let me ask: ", "Just curious: ", "By the way, ", "Another one: ", "Excuse me, ",
)  # fmt: skip
ENDINGS = ("", "", "", "", "", "", "", "", " Thanks!", " Thank you.", " Please.", " I am curious.", " I want to know.", " ok?",
           " For my notes.", " Go!", " :)", " Thanks in advance.", " It is important.", " Just asking.")  # fmt: skip


DIGITS = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
ADD = (
    "What is {a} plus {b}?", "{a} + {b}", "Add {a} and {b}.", "What is {a} + {b}?", "Compute {a} + {b}.", "How much is {a} plus {b}?",
    "Please add {a} and {b}.", "{a}+{b}?", "What's {a} + {b}?", "Calculate {a} plus {b}.", "What is the sum of {a} and {b}?", "{a} plus {b}?",
    "Can you add {a} and {b}?", "What do {a} and {b} add up to?", "How much is {a} + {b}?", "{a} + {b} = ?", "Sum {a} and {b}.", "What is {a}+{b}?",
    "Add {b} to {a}.", "{a} and {b} together?", "What do you get if you add {a} and {b}?", "Solve {a} + {b}.", "The sum of {a} and {b}?",
    "I have {a} apples and get {b} more. How many do I have?", "How many are {a} and {b}?", "{a}+{b}=", "Tell me {a} plus {b}.",
)  # fmt: skip
BARE = (
    "Just the number.", "Only the number, please.", "Answer with the number only.", "Number only.", "Just give the number.",
    "Reply with the number only.", "Only digits.", "Answer with a number.", "Give only the result.", "Nothing but the number.",
)  # fmt: skip
LARGER = (
    "Which is larger, {a} or {b}?", "Is {a} or {b} bigger?", "Which number is greater: {a} or {b}?", "Tell me the larger of {a} and {b}.",
    "What is bigger, {a} or {b}?", "Which is more, {a} or {b}?", "Which one is larger: {a} or {b}?", "Compare {a} and {b}.", "Compare the numbers {a} and {b}.", "Compare {a} with {b}.", "Is {a} larger than {b}?",
    "Which is the bigger number, {a} or {b}?", "Is {a} bigger or {b}?", "{a} or {b}, which is larger?", "Which of {a} and {b} is greater?",
    "What is the maximum of {a} and {b}?", "Pick the larger number: {a}, {b}.", "Which is higher, {a} or {b}?", "{a} or {b}: which is bigger?",
    "Is {a} more than {b}?", "Name the larger of {a} and {b}.", "Find the larger number of {a} and {b}.",
)  # fmt: skip
SMALLER = (
    "Which is smaller, {a} or {b}?", "Is {a} or {b} smaller?", "Which number is less: {a} or {b}?", "Tell me the smaller of {a} and {b}.",
    "What is smaller, {a} or {b}?", "Which is less, {a} or {b}?", "Is {a} smaller than {b}?", "{a} or {b}, which is smaller?", "Is {a} less than {b}?",
    "What is the minimum of {a} and {b}?", "Which of {a} and {b} is smaller?", "Which is lower, {a} or {b}?", "Name the smaller of {a} and {b}.",
    "Pick the smaller number: {a}, {b}.", "Find the smaller number of {a} and {b}.",
)  # fmt: skip
OTHER_SUMS = (
    "What is {a} times {b}?", "{a} * {b}", "What is {a} minus {b}?", "{a} - {b}", "{a} / {b}", "Divide {a} by {b}.", "Multiply {a} by {b}.",
    "Subtract {b} from {a}.", "What is {a} divided by {b}?", "{a} x {b}?", "How much is {a} times {b}?", "What is {a} - {b}?", "Multiply {a} and {b}.",
    "What is the product of {a} and {b}?", "What is the square root of {a}?", "What is {a} percent of {b}?", "Calculate {a} * {b}.",
    "How much is {a} minus {b}?", "What is {a} to the power of {b}?", "{a} minus {b}?", "Compute {a} / {b}.",
)  # fmt: skip
COUNT_TO = (
    "Count to {n}.", "Count from one to {n}.", "Count from 1 to {n}.", "Can you count to {n}?", "Please count to {n}.", "Count up to {n}.",
    "List the numbers from 1 to {n}.", "Write the numbers 1 to {n}.", "Say the numbers up to {n}.", "Count to {n} for me.", "Could you count to {n}?",
    "Give me the numbers from 1 to {n}.", "Show me how you count to {n}.", "Now count to {n}.",
)  # fmt: skip
COUNT_BETWEEN = (
    "Count from {m} to {n}.", "List the numbers from {m} to {n}.", "Can you count from {m} to {n}?", "Write the numbers {m} to {n}.",
    "Give me the numbers from {m} to {n}.", "Please count from {m} to {n}.", "Count up from {m} to {n}.", "Say the numbers from {m} to {n}.",
)  # fmt: skip
COUNT_DOWN = (
    "Count down from {n}.", "Count backwards from {n}.", "Count down from {n} to 1.", "Count backwards from {n} to one.", "Can you count down from {n}?",
    "Please count down from {n}.", "Do a countdown from {n}.", "Start a countdown at {n}.", "Count from {n} down to 1.",
)  # fmt: skip
ECHO = (
    "Say {w}", "Repeat: {w}", "Please say {w}", "Write {w}", "Repeat exactly: {w}", "Repeat after me: {w}", "Echo {w}", "Just say {w}",
    "Say the word {w}", "Write the word {w}", "Repeat the word {w}", "Say exactly: {w}", "Reply with {w}", "Reply with exactly {w}",
    "Answer with {w}", "Output {w}", "Print {w}", "Type {w}", "Can you say {w}", "Repeat this: {w}", "Repeat this exactly: {w}", "Copy this: {w}",
    "Write exactly this: {w}", "Respond with {w}", 'Say "{w}"', 'Repeat "{w}"', "Echo this back: {w}", "Please repeat: {w}", "Say only {w}",
    "Repeat the following: {w}", "Return {w}", "Send back {w}", "Quote: {w}", "Reply only with {w}", "Write down {w}", "Say this: {w}",
    'Please say "{w}"', "Echo: {w}", "Give me back {w}", "Now say {w}", "Say it again: {w}",
)  # fmt: skip
TELL: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "name": (
        ("My name is {n}.", "I am {n}.", "Call me {n}.", "I'm {n}.", "The name is {n}.", "You can call me {n}.", "People call me {n}.", "This is {n}.",
         "My friends call me {n}.", "They call me {n}.", "Please call me {n}.", "My name's {n}.", "It's {n}.", "{n} is my name.", "{n} here.",
         "I go by {n}.", "I am called {n}.", "Please remember that my name is {n}.", "Let me introduce myself: {n}.", "You are talking to {n}."),
        ("What is my name?", "Do you remember my name?", "Who am I?", "What am I called?", "Can you tell me my name?", "What's my name?", "Say my name.",
         "Do you know my name?", "What did I say my name was?", "Tell me my name.", "How am I called?", "Do you still know who I am?", "My name is what?",
         "What name did I give you?", "Do you know who I am?", "Remind me of my name.", "Which name did I tell you?", "Who are you talking to?",
         "Have you forgotten my name?", "Please say my name.", "What was my name again?", "Repeat my name."),
        "Your name is {n}.",
    ),
    "city": (
        ("I live in {n}.", "I am from {n}.", "I come from {n}.", "My city is {n}.", "My home is in {n}.", "I'm from {n}.", "I moved to {n}.", "My home town is {n}.",
         "I am living in {n} now.", "My flat is in {n}."),
        ("Where do I live?", "Which city do I live in?", "Where am I from?", "What is my city?", "Do you remember where I live?", "Where is my home?",
         "What city am I from?", "Do you know where I live?", "In which city do I live?", "Tell me where I live.", "Where did I say I live?"),
        "You live in {n}.",
    ),
    "color": (
        ("My favorite color is {n}.", "My favourite colour is {n}.", "The color I like most is {n}.", "I like the color {n} best.", "{n} is my favorite color.",
         "My best-loved color is {n}."),
        ("What is my favorite color?", "Which color do I like?", "What's my favourite colour?", "Do you remember my favorite color?", "What color do I like most?",
         "Tell me my favorite color.", "Which color is my favorite?", "Do you know my favorite color?"),
        "Your favorite color is {n}.",
    ),
    "pet": (
        ("My dog is called {n}.", "My cat is called {n}.", "I have a dog named {n}.", "I have a cat named {n}.", "My pet is called {n}.", "My pet's name is {n}.",
         "The name of my dog is {n}.", "My cat's name is {n}.", "I have a pet called {n}."),
        ("What is my pet called?", "What is the name of my pet?", "What's my pet's name?", "Do you remember my pet's name?", "How is my pet called?",
         "Do you know the name of my pet?", "Tell me the name of my pet.", "What did I call my pet?"),
        "Your pet is called {n}.",
    ),
    "word": (
        ("The secret word is {n}.", "Remember the word {n}.", "Remember this word: {n}.", "The password is {n}.", "Please remember {n}.", "Keep this in mind: {n}.",
         "My secret word is {n}.", "The magic word is {n}.", "Remember: {n}.", "The code word is {n}.", "Do not forget the word {n}."),
        ("What is the secret word?", "Which word did I tell you?", "What was the word?", "What is the password?", "Which word should you remember?",
         "Tell me the secret word.", "What did I ask you to remember?", "Do you remember the word?", "What is the code word?", "What's the magic word?",
         "Say the secret word.", "What was the secret word again?"),
        "The word is {n}.",
    ),
}  # fmt: skip
REMINDERS = (
    " Remember it.",
    " Please remember that.",
    " Nice to meet you.",
    " Do not forget it.",
    " Remember that.",
)
NOT_TOLD = {
    "name": "You have not told me your name yet.",
    "city": "You have not told me where you live.",
    "color": "You have not told me your favorite color.",
    "pet": "You have not told me about a pet.",
    "word": "You have not told me a word to remember.",
}
STRANGE = (
    "What is the capital of {p}?", "Who was {n}?", "Who is {n}?", "Tell me about {n}.", "What is a {w}?", "Explain {w}.", "Describe {p}.", "How do I cook {w}?",
    "Translate {w} into French.", "What does {w} mean?", "When was {n} born?", "Who invented the {w}?", "Where can I buy a {w}?", "Write a Python function for {w}.",
    "Write a program that sorts a {w}.", "What is the meaning of life?", "Who won the world cup?", "How old is {n}?", "What is the population of {p}?",
    "Tell me about {p}.", "Tell me about the {w}.", "How do I repair a {w}?", "Why is the {w} {j}?", "What is the best {w}?", "How far is it to {p}?",
    "Who is the president of {p}?", "Write a story about a {w}.", "Summarize this: the {w} is {j}.", "What is the history of {p}?", "Can you draw a {w}?",
    "Recommend me a book about {w}.", "What happened in {p}?", "How do I get to {p}?", "Write an email to {n}.", "What does a {w} eat?", "How many people live in {p}?",
    "How does a {w} work?", "Is the {w} {j}?", "Write a song about {w}.", "Which language is spoken in {p}?", "What is {w} made of?", "Do you know {n}?",
    "Give me a recipe for {w}.", "What is a {j} {w}?", "Where is {p}?", "Show me a picture of a {w}.", "Why do people like {w}?", "Who wrote {w}?",
)  # fmt: skip
SAID = (
    "I like {w}.", "I saw a {w} today.", "My {w} is {j}.", "I bought a {j} {w}.", "The {w} is {j}.", "I think the {w} is {j}.", "There is a {w} in the {v}.",
    "I went to {p} last year.", "{n} is my friend.", "I am tired.", "It is a {j} day.", "I met {n} in {p}.", "I am hungry.", "We have a {j} {w} and a {v}.",
    "I lost my {w}.", "My sister has a {w}.", "The {w} and the {v} are {j}.", "I am working on a {w}.", "I am bored.", "{p} is {j}.", "I read a book about {w}.",
)  # fmt: skip
FILLER_LEADS = (
    "",
    "",
    "",
    "Here is a note. ",
    "Read this: ",
    "Some text first. ",
    "Listen: ",
    "Context: ",
    "My notes: ",
)
FILLER_TAILS = (
    " ",
    " ",
    " ",
    " ",
    "\n",
    "\n\n",
    " Question: ",
    " Now tell me: ",
    " Now, ",
    "\nQuestion: ",
)


def plain(text: str) -> str:
    """Reduces a phrasing to what the split is about: lower case, no punctuation."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def phrase(rng: random.Random, cores: tuple[str, ...], score: bool, key: str = "") -> str:
    """Composes opening and core and returns a phrasing of this side of the split, slots unfilled.

    `key` (a topic, a tool kind) is part of what is hashed, so that each topic has its own held-out phrasings.
    """
    while True:
        opening, core = rng.choice(OPENINGS), rng.choice(cores)
        if held(f"{key}|{plain(opening)}|{plain(core)}") == score:
            break
    if (
        opening
        and opening[-2] not in ".!?:"
        and core[:2] not in ("I ", "I'", "{x", "{n", "{a", "{c")
    ):
        core = core[:1].lower() + core[1:]
    return opening + core


def finish(rng: random.Random, text: str) -> str:
    """Adds what varies freely around a phrasing: an ending, missing punctuation, small letters, a typing slip."""
    roll = rng.random()
    if roll < 0.12:
        text = text.rstrip(".?!")
    elif roll < 0.18:
        text = (
            text[:-1] + rng.choice([" ?", "??", "!", "...", " ."]) if text[-1:] in ".?!" else text
        )
    elif roll < 0.36:
        text += rng.choice(ENDINGS)
    return text


def slip(rng: random.Random, text: str) -> str:
    """Spoils the casing or one letter of a phrasing whose slots are still unfilled."""
    roll = rng.random()
    if roll < 0.15:
        return text.lower()
    if roll < 0.18:
        places = [i for i, (a, b) in enumerate(pairwise(text)) if (a + b).isalpha()]
        depth = [text[:i].count("{") - text[:i].count("}") for i in places]
        places = [i for i, d in zip(places, depth, strict=True) if d == 0]
        if places:
            at = rng.choice(places)
            swap = rng.random() < 0.5
            text = text[:at] + (text[at + 1] + text[at] if swap else text[at]) + text[at + 2 :]
    return text
