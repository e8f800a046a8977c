"""What the embedded model knows: topics with their sentences, and small talk.

Pure data. How topics are asked about is in `phrasings`.
"""

from typing import NamedTuple


class Topic(NamedTuple):
    """Something the model can speak about: how it may be called, own questions, and its sentences in order."""

    names: tuple[str, ...]
    questions: tuple[str, ...]
    sentences: tuple[str, ...]


TOPICS: dict[str, Topic] = {
    "tpu": Topic(
        ("a TPU", "TPUs", "the TPU", "tensor processing units", "Cloud TPU"),
        ("What does TPU stand for?", "What are TPUs good for?", "Who makes TPUs?"),
        ("A TPU is a Tensor Processing Unit, a chip that Google designed for machine learning.",
         "Its matrix units multiply large blocks of numbers at once.",
         "In the cloud it can be rented by the hour."),
    ),
    "v5e": Topic(
        ("the TPU v5e", "v5e", "a v5e chip", "TPU v5e", "the v5e-1"),
        ("Which TPU do I need?", "Which TPU does this project use?", "What chip is this made for?"),
        ("A TPU v5e chip has 16 GB of fast memory, enough for Gemma 4 E2B.",
         "This project rents one such chip as a v5e-1 machine.",
         "The rig creates it, starts it and reports every stage."),
    ),
    "project": Topic(
        ("this project", "torchtpu_rs", "torchtpu-rs", "this server", "this repository", "this software"),
        ("What is this?", "What does this project do?", "What am I talking to here?", "What does the server do?"),
        ("This project serves Gemma 4 with the model written in Rust on PyTorch devices.",
         "It runs on TPU through TorchTPU and on an ordinary CPU.",
         "Clients talk to it through the OpenAI API."),
    ),
    "rust": Topic(
        ("Rust", "the Rust code", "the Rust part", "the Rust crate"),
        ("Why Rust?", "Why is the model written in Rust?", "What does Rust do here?", "What is written in Rust?",
         "What language is the model written in?"),
        ("The forward pass, the ring cache and the decode loop are Rust code that calls PyTorch's operators.",
         "Python only hosts the process and the web server.",
         "Rust knows token ids and never sees text."),
    ),
    "ring": Topic(
        ("a ring cache", "the ring cache", "ring caches", "the KV cache", "the cache", "the key value cache"),
        ("How does the cache work?", "How does the ring cache work?", "Why is it called a ring cache?",
         "What is stored in the cache?"),
        ("A ring cache keeps the keys and values of the last positions of a sliding window layer.",
         "Each new token overwrites the oldest entry.",
         "So its memory stays the same however long the chat gets."),
    ),
    "window": Topic(
        ("a sliding window", "the sliding window", "sliding window attention", "sliding attention"),
        ("How large is the window?", "Which layers use a sliding window?", "How far does a sliding layer see?"),
        ("A sliding window layer looks only at the most recent tokens.",
         "In Gemma 4 E2B the window is 512 tokens, in me it is only 64.",
         "Full attention layers in between still see everything."),
    ),
    "layers": Topic(
        ("shared layers", "KV sharing", "the shared layers", "KV-shared layers", "shared keys and values"),
        ("How many layers share their keys?", "Which layers share keys and values?"),
        ("The last layers of Gemma 4 E2B reuse the keys and values of earlier layers.",
         "They are 20 of its 35 layers.",
         "That saves memory and makes reading a prompt cheaper."),
    ),
    "attention": Topic(
        ("attention", "the attention mechanism", "self-attention", "full attention"),
        ("How does attention work?", "What does attention do?"),
        ("Attention lets every token look back at earlier tokens and take what it needs from them.",
         "Gemma 4 mixes sliding window layers with full attention layers.",
         "Copying a name from the start of a chat is the work of a full layer."),
    ),
    "port": Topic(
        ("the port", "the ports", "the server's port", "port 8000"),
        ("Which port does the server use?", "What port do you listen on?", "Where can I reach the server?",
         "Which port should I call?", "What is the port number?", "On which port does this run?",
         "What's the address of the server?"),
        ("The server listens on port 8000.",
         "The laptop shim listens on port 8015.",
         "Both speak the OpenAI API."),
    ),
    "shim": Topic(
        ("the shim", "the laptop shim", "port 8015", "the shim on my laptop"),
        ("What does the shim do?", "What runs on port 8015?", "Why is there a shim?", "What is on port 8015?"),
        ("The laptop shim listens on port 8015 and passes requests on to the TPU machine.",
         "It also has a chat page and an MCP server.",
         "So your programs need one local address only."),
    ),
    "api": Topic(
        ("the API", "the OpenAI API", "the HTTP API", "the endpoints", "your API"),
        ("How do I call you?", "Which endpoints are there?", "Which API do you speak?", "How can I use the API?"),
        ("The server speaks the OpenAI API, so any OpenAI client can talk to it.",
         "Chats go to /v1/chat/completions.",
         "Answers can be streamed token by token."),
    ),
    "streaming": Topic(
        ("streaming", "token streaming", "streamed answers", "server-sent events"),
        ("How does streaming work?", "Can you stream answers?", "How do I get tokens one by one?"),
        ("With streaming on, every token is sent as soon as it is known.",
         "The whole answer is made from the same events.",
         "Set stream to true in the request."),
    ),
    "torchtpu": Topic(
        ("TorchTPU", "torch tpu", "the TorchTPU backend"),
        ("How does PyTorch run on TPU?", "What does TorchTPU do?"),
        ("TorchTPU makes a TPU a PyTorch device.",
         "The model's step is captured once and compiled for the chip.",
         "Many tokens are then decoded in one launch."),
    ),
    "pytorch": Topic(
        ("PyTorch", "torch", "the PyTorch library"),
        ("What is PyTorch used for here?", "Why PyTorch?", "Do you need PyTorch?"),
        ("PyTorch is a library for tensors and neural networks.",
         "Here its C++ core, ATen, does the arithmetic.",
         "The model itself is Rust."),
    ),
    "aten": Topic(
        ("ATen", "the ATen library", "the C++ shim", "the ATen shim"),
        ("What does ATen do?", "How does Rust call PyTorch?"),
        ("ATen is PyTorch's C++ library of tensor operators.",
         "A small C++ shim lets the Rust code call it.",
         "The same calls run on CPU and on TPU."),
    ),
    "python": Topic(
        ("Python", "the Python code", "the Python part"),
        ("What does Python do here?", "Why is there still Python?", "What is written in Python?"),
        ("Python hosts the process and the web server.",
         "It turns text into token ids and back.",
         "The model is not written in it."),
    ),
    "gemma": Topic(
        ("Gemma 4", "Gemma", "the Gemma models", "gemma4", "the Gemma family"),
        ("Who made Gemma?", "Which Gemma models are there?", "What kind of model is Gemma 4?"),
        ("Gemma 4 is a family of open models from Google.",
         "Its members are E2B, E4B, 12B, 26B-A4B and 31B.",
         "I am built like the smallest of them, only far smaller."),
    ),
    "e2b": Topic(
        ("E2B", "Gemma 4 E2B", "the E2B model", "gemma-4-E2B-it"),
        ("How many layers does E2B have?", "Which model fits on one chip?"),
        ("Gemma 4 E2B has 35 layers and fits on one TPU v5e chip.",
         "Its per-layer inputs hold about half of its weights.",
         "It is the model this project is made for."),
    ),
    "ple": Topic(
        ("per-layer inputs", "per-layer embeddings", "PLE", "the per-layer table"),
        ("What is the per-layer table for?", "What are per-layer embeddings good for?"),
        ("Per-layer inputs give every layer its own small vector for each token.",
         "They come from a large table that is only looked up.",
         "So they cost memory but hardly any time."),
    ),
    "tokens": Topic(
        ("a token", "tokens", "the tokenizer", "your tokenizer", "a tokenizer"),
        ("How is text turned into tokens?", "How large is your vocabulary?", "How do you read text?"),
        ("A token is a piece of text that has a number.",
         "My tokenizer has about two thousand of them, Gemma 4's has 262,144.",
         "Letters it does not know become bytes."),
    ),
    "llm": Topic(
        ("a language model", "language models", "an LLM", "LLMs", "a large language model"),
        ("How do language models work?", "How does an LLM write text?"),
        ("A language model predicts the next token of a text again and again.",
         "It learned from examples how texts go on.",
         "Large ones know much, a tiny one like me knows little."),
    ),
    "quant": Topic(
        ("quantization", "int4", "int4 weights", "quantized weights", "W4A16"),
        ("What does quantization do?", "Can you run int4 weights?", "Why quantize a model?"),
        ("Quantization stores weights with fewer bits, such as 4 instead of 16.",
         "Less memory is read for each token, so decoding is faster.",
         "The price is a small error."),
    ),
    "bf16": Topic(
        ("bf16", "bfloat16", "the bfloat16 format"),
        ("Which number format do you use?", "What precision do you use?", "In which format are your weights?"),
        ("bf16 is a 16-bit number with the range of a 32-bit one.",
         "My weights are stored in it, like those of Gemma 4.",
         "TPUs multiply it at full speed."),
    ),
    "cpu": Topic(
        ("the CPU", "a CPU", "running on CPU", "CPU mode"),
        ("Can you run without a TPU?", "Do I need a TPU?", "Does this run on my laptop?"),
        ("No TPU is needed: the server runs on an ordinary CPU by default.",
         "The same Rust code runs on every PyTorch device.",
         "A TPU makes large models fast."),
    ),
    "serve": Topic(
        ("a real model", "a full checkpoint", "a bigger model", "the full Gemma 4", "another checkpoint"),
        ("How do I serve a real model?", "How do I load another model?", "How can I get better answers?",
         "How do I use the full Gemma 4?", "Can you give better answers?", "How do I start the server?"),
        ("Start the server with the folder of a Gemma 4 checkpoint and it will answer instead of me.",
         "E2B needs about 10 GB of memory.",
         "On a TPU v5e it runs fast."),
    ),
    "rig": Topic(
        ("the rig", "the TPU rig", "the rig's MCP server"),
        ("How do I get a TPU machine?", "What does the rig do?", "Who creates the TPU machine?"),
        ("The rig creates a Cloud TPU v5e machine and starts the server on it.",
         "It reports each stage of the start.",
         "It also takes the machine down, so that it costs nothing more."),
    ),
    "mcp": Topic(
        ("MCP", "the MCP server", "the Model Context Protocol"),
        ("What does MCP stand for?", "What is MCP used for?"),
        ("MCP is the Model Context Protocol, a way to offer tools to models.",
         "The rig and the laptop shim each have an MCP server.",
         "So an assistant can start and watch the TPU."),
    ),
    "tools": Topic(
        ("tool calls", "tools", "tool calling", "function calling"),
        ("How do tool calls work?", "Can you call tools?", "Can you use tools?", "How do I offer you a tool?"),
        ("When a request offers tools, I can call one with arguments from your question.",
         "Your program runs it and sends back the result.",
         "Then I answer with the values in it."),
    ),
    "ocean": Topic(
        ("the ocean", "the sea", "oceans", "the oceans"),
        ("Why is the ocean important?", "What do you know about the sea?"),
        ("The ocean covers most of the Earth and holds nearly all of its water.",
         "Its currents carry heat around the planet and shape the weather on every coast.",
         "From tiny plankton to great whales, it is home to more life than any forest."),
    ),
    "moon": Topic(
        ("the moon", "the Moon", "our moon"),
        ("Why does the moon shine?", "What makes the tides?"),
        ("The moon circles the Earth once in about 27 days.",
         "It shines because it reflects the light of the sun.",
         "Its pull makes the tides of the sea."),
    ),
    "sun": Topic(
        ("the sun", "the Sun", "our sun", "our star"),
        ("Why is the sun hot?", "Why does the sun shine?"),
        ("The sun is the star in the middle of our solar system.",
         "Deep inside it, hydrogen turns into helium and gives off light and heat.",
         "It is about 4.6 billion years old."),
    ),
    "forest": Topic(
        ("the forest", "forests", "the woods", "a forest"),
        ("Why do we need forests?", "What lives in a forest?"),
        ("A forest is land covered with trees.",
         "It cleans the air, holds the soil and gives a home to many animals.",
         "On a hot day it is the coolest place to walk."),
    ),
    "rain": Topic(
        ("rain", "the rain", "rainfall"),
        ("Why does it rain?", "Where does rain come from?", "How is rain made?"),
        ("Rain is water that falls from clouds.",
         "The sun lifts water from seas and rivers, and it cools into drops high in the air.",
         "Without it hardly anything would grow."),
    ),
    "coffee": Topic(
        ("coffee", "a cup of coffee"),
        ("How is coffee made?", "Where does coffee come from?"),
        ("Coffee is a drink made from the roasted seeds of the coffee plant.",
         "The plant grows in warm countries near the equator.",
         "I have never had a cup myself."),
    ),
}  # fmt: skip

WHO = Topic(
    ("you", "yourself"),
    ("Who are you?", "What are you?", "Introduce yourself.", "Tell me who you are.", "Which model are you?",
     "What model is this?", "Are you Gemma 4?", "Are you a real model?", "What kind of model are you?",
     "Tell me about yourself.", "Which model am I talking to?", "What is your name?", "What's your name?",
     "Do you have a name?", "What should I call you?", "Who am I talking to?", "Describe yourself.",
     "How big are you?", "How many parameters do you have?", "How large are you?", "What is your size?",
     "Are you a large language model?", "Are you ChatGPT?", "Are you an AI?", "Are you human?", "Are you a bot?"),
    ("I am a tiny Gemma 4 style model with a few million parameters, here for trying the server.",
     "For real answers, serve a full Gemma 4 checkpoint.",
     "I was trained on a made-up corpus in under an hour on two CPU cores."),
)  # fmt: skip
TOPICS["who"] = WHO

# Small talk has one answer whatever length is asked for.
TALK: dict[str, tuple[tuple[str, ...], str]] = {
    "abilities": (
        ("What can you do?", "What can you do for me?", "How can you help me?", "What are you able to do?",
         "What do you know?", "What can I ask you?", "What should I ask you?", "What are you good at?",
         "Which questions can you answer?", "Tell me what you can do.", "List your abilities.", "Help!", "help",
         "What are your skills?", "Give me some ideas what to ask.", "How can I use you?", "I need help.",
         "Can you help me?", "What else can you do?", "Show me what you can do."),
        "I can talk about this project and TPUs, add and compare small numbers, remember your name, repeat words "
        "and call tools.",
    ),
    "mood": (
        ("How are you?", "How are you doing?", "How do you do?", "How is it going?", "How's it going?", "How are things?",
         "Are you okay?", "Are you well?", "What's up?", "How do you feel?", "How was your day?", "How are you today?"),
        "I am fine, thank you. What would you like to know?",
    ),
    "thanks": (
        ("Thanks!", "Thank you.", "Thank you very much!", "Thanks a lot.", "Many thanks!", "Great, thanks.",
         "That helps, thank you.", "Thanks for your help.", "Thx", "Cheers!", "Perfect, thank you!", "Thank you so much.",
         "Nice, thanks!", "Wonderful, thank you.", "Cool, thanks.", "I appreciate it.", "Thank you for the answer."),
        "You are welcome!",
    ),
    "bye": (
        ("Bye!", "Goodbye.", "Good bye", "See you!", "See you later.", "Bye bye", "I have to go now.", "Good night!",
         "Until next time.", "That is all, bye.", "Farewell!", "Take care!", "See you tomorrow.", "Have a nice day!",
         "Talk to you later.", "That's all for today.", "I am leaving now.", "Ciao!"),
        "Goodbye! It was nice talking to you.",
    ),
    "joke": (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell me something funny.", "A joke, please.",
         "Say something funny.", "I want to hear a joke.", "Know any jokes?", "Can you tell a joke?", "Joke!",
         "Tell a joke.", "Give me a joke.", "Do you know any good jokes?"),
        "Why did the tensor cross the bus? To get to the other core.",
    ),
    "poem": (
        ("Write a poem.", "Write me a poem.", "Can you write a poem?", "Compose a short poem.", "A poem, please.",
         "Write a haiku.", "Write a haiku about the cache.", "Make up a poem.", "Write a short poem for me.",
         "Do you know a poem?", "Write some poetry.", "Tell me a poem.", "I would like a poem."),
        "Tokens come and go,\nthe ring forgets the oldest,\nthe full layer knows.",
    ),
    "oneword": (
        ("Reply with one word.", "Answer with one word.", "Say one word.", "Just one word, please.", "Say something.",
         "Give me one word.", "Respond with a single word.", "One word answer, please.", "Say anything.", "Answer in one word."),
        "Gladly!",
    ),
    "yes": (
        ("Are you there?", "Are you ready?", "Does this work?", "Is this working?", "Can you hear me?", "Do you work?",
         "Is anybody there?", "Are you online?", "Test", "test", "testing", "This is a test.", "ping", "Is the server running?",
         "Are you awake?", "Can you read this?", "Is it on?"),
        "Yes, I am here and the server works.",
    ),
    "praise": (
        ("Good job!", "Well done.", "You are great.", "Nice!", "Great!", "Cool.", "Very good.", "Good answer.", "Ok", "Okay.",
         "I see.", "That is right.", "Correct!", "Wow!", "Interesting.", "Good to know.", "I understand.", "Got it.",
         "Awesome!", "That's nice.", "Fine.", "All right."),
        "Good! What else would you like to know?",
    ),
}  # fmt: skip

GREETINGS = (
    "Hello", "Hi", "Hey", "Hello there", "Hi there", "Hey there", "Good morning", "Good evening", "Good afternoon",
    "Good day", "Greetings", "Hallo", "Hiya", "Howdy", "Morning", "Hello again", "Hi again", "Hey you", "Welcome",
    "Hello my friend", "Hi friend", "Hello assistant", "Hi model", "Hello Gemma", "Hey Gemma", "Hi bot", "Hello world",
    "Hello hello", "Hi everyone", "Hello everybody", "Yo", "Servus", "Hola", "Bonjour", "Ciao bella",
    "Greet me", "Please greet me", "Salutations", "Evening", "Nice to meet you", "Pleased to meet you", "Hello dear",
)  # fmt: skip
GREETING_TAILS = (
    "",
    "!",
    ".",
    "!!",
    " :)",
    ", my friend!",
    ", how nice.",
    ", glad to meet you.",
    "...",
    ", good to see you.",
    ", are you there?",
)

HELLO = "Hello! How can I help you?"
UNKNOWN = "I do not know that. I am a tiny model for trying the server."
NO_TOOL = "I have no tool for that. Offer me one and I will call it."
ONLY_SUMS = "I can only add and compare small numbers."
HEARD = "I see. Ask me about this project, TPUs or small numbers."
REMEMBERED = "Okay, I will remember that."
