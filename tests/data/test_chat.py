"""Which tokens of a conversation are supervised, under templates of every style."""

import pytest

from megatrain.data.rows import Row
from megatrain.data.tokenization import Encoder
from megatrain.errors import ConfigError
from support.tiny_tokenizer import tiny_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Contents are stripped; the start token is written through a variable.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
)
# The system turn is folded into the first user turn; a blank stands before the end token.
BRACKETS = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {% if loop.first and system %}<<{{ system }}>>\n{% endif %}"
    "{{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
# Ordinary words only, the end token behind the whole conversation.
PLAIN = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ eos_token }}{% endif %}"
)
# Reasoning is shown in the last turn only, so the rendering of a prefix is no prefix of the rendering.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "{% if loop.last and parts | length > 1 %}"
    "<think>\n{{ parts[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{{ parts[-1].lstrip('\n') }}"
    "{% else %}{{ parts[-1].lstrip('\n') }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
MARKED_WITH_END = MARKED.replace("{% endgeneration %}", "<|im_end|>\n{% endgeneration %}").replace(
    "{% endif %}<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}"
)

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>")
TALK = (
    {"role": "system", "content": "you are kind"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "how are you?"},
    {"role": "user", "content": "how are you?"},
    {"role": "assistant", "content": "i am fine, thank you."},
    {"role": "user", "content": "what is the capital?"},
    {"role": "assistant", "content": "paris"},
)


def encode(template, messages=TALK, supervise="assistant", **settings):
    settings = {"bos": "<s>", "eos": "</s>"} | settings
    tokenizer = tiny_tokenizer(specials=SPECIALS, template=template, **settings)
    row = Row(kind="chat", file=0, number=1, messages=tuple(messages))
    return tokenizer, Encoder(tokenizer, supervise).encode([row], ["rows.jsonl:1"])[0]


def stock_ids(tokenizer, messages=TALK):
    return tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True)["input_ids"]


def learnt(tokenizer, encoded):
    """Runs of supervised tokens, as text."""
    runs, open_run = [], False
    for token, flag in zip(encoded.ids.tolist(), encoded.supervised.tolist(), strict=True):
        if flag and open_run:
            runs[-1].append(token)
        elif flag:
            runs.append([token])
        open_run = bool(flag)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (HEADERS, "<|eot|>"), (BRACKETS, " </s>"), (MARKED, "<|im_end|>")],
    ids=["chatml", "headers", "brackets", "generation"],
)
def test_exactly_the_assistant_contents_and_their_end_tokens_are_supervised(template, end):
    tokenizer, encoded = encode(template)
    expected = ["how are you?", "i am fine, thank you.", "paris"]
    # A token that holds the blank before a content and its first letters belongs to the content.
    assert [text.removeprefix(" ") for text in learnt(tokenizer, encoded)] == [text + end for text in expected]
    assert encoded.ids.tolist() == stock_ids(tokenizer)
    assert encoded.endless == 0


def test_only_the_last_turn_is_supervised_when_asked():
    for template in (CHATML, MARKED):
        tokenizer, encoded = encode(template, supervise="last")
        assert learnt(tokenizer, encoded) == ["paris<|im_end|>"]


def test_everything_is_supervised_when_asked():
    for template in (CHATML, MARKED):
        tokenizer, encoded = encode(template, supervise="all")
        assert encoded.supervised.all()
        assert encoded.ids.tolist() == stock_ids(tokenizer)


def test_a_mark_that_covers_the_end_token_is_taken_as_it_is():
    tokenizer, encoded = encode(MARKED_WITH_END)
    assert learnt(tokenizer, encoded)[-1] == "paris<|im_end|>\n"
    assert "<|im_start|>" not in "".join(learnt(tokenizer, encoded))


def test_a_prefix_that_renders_otherwise_does_not_move_the_mask():
    talk = [
        *TALK[1:3],
        {"role": "user", "content": "two and two?"},
        {"role": "assistant", "content": "<think>\nthe user adds\n</think>\n\nfour"},
    ]
    earlier = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "<think>\nthe user is kind\n</think>\n\nhello there"},
        *talk[2:],
    ]
    tokenizer, encoded = encode(REASONING, talk)
    assert learnt(tokenizer, encoded) == [
        "how are you?<|im_end|>",
        "<think>\nthe user adds\n</think>\n\nfour<|im_end|>",
    ]
    tokenizer, encoded = encode(REASONING, earlier)
    assert learnt(tokenizer, encoded)[0] == "hello there<|im_end|>"
    assert encoded.ids.tolist() == stock_ids(tokenizer, earlier)


def test_a_template_that_ends_only_the_conversation_leaves_earlier_turns_without_an_end():
    tokenizer, encoded = encode(PLAIN)
    runs = learnt(tokenizer, encoded)
    assert [text.strip() for text in runs[:2]] == ["how are you?", "i am fine, thank you."]
    assert runs[2].strip().endswith("</s>")


# Each role has an opening token of its own, and the end token follows the last answer only.
ROLES = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% if loop.last %}{{ eos_token }}{% endif %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
UNMARKED_ROLES = ROLES.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", [UNMARKED_ROLES, ROLES], ids=["found", "generation"])
@pytest.mark.parametrize("last", [5, 7], ids=["ends with a user", "ends with an answer"])
def test_what_opens_the_next_turn_is_not_learnt_as_the_end_of_an_answer(template, last):
    tokenizer = tiny_tokenizer(specials=("<|system|>", "<|user|>", "<|assistant|>"), template=template)
    talk = (*TALK[:last], *([{"role": "user", "content": "<|user|> hi"}] if last == 5 else []))
    row = Row(kind="chat", file=0, number=1, messages=talk)
    (encoded,) = Encoder(tokenizer).encode([row], ["rows:1"])
    answers = [message["content"] for message in talk if message["role"] == "assistant"]
    ends = "" if last == 5 else tokenizer.eos_token
    assert learnt(tokenizer, encoded) == [*answers[:-1], answers[-1] + ends]
    assert encoded.endless == (2 if last == 5 else len(answers) - 1)


def test_marked_turns_of_a_conversation_that_ends_with_a_user_keep_their_end():
    tokenizer, encoded = encode(MARKED, TALK[:4])
    assert learnt(tokenizer, encoded) == ["how are you?<|im_end|>"]
    assert encoded.endless == 0


def test_end_markers_that_the_tokenizer_does_not_know_are_supervised_as_text():
    tokenizer = tiny_tokenizer(template=CHATML)  # no special tokens for the template's words
    row = Row(kind="chat", file=0, number=1, messages=TALK[1:5])
    encoded = Encoder(tokenizer).encode([row], ["rows:1"])[0]
    assert learnt(tokenizer, encoded)[-1].startswith("i am fine, thank you.<|im_end|>")
    assert "im_start" not in "".join(learnt(tokenizer, encoded))


def test_contents_that_repeat_the_markup_are_found():
    talk = [
        {"role": "user", "content": "say\nassistant\npa"},
        {"role": "assistant", "content": "say\nassistant\npa"},
        {"role": "user", "content": "pa"},
        {"role": "assistant", "content": "pa"},
    ]
    tokenizer, encoded = encode(CHATML, talk)
    assert learnt(tokenizer, encoded) == ["say\nassistant\npa<|im_end|>", "pa<|im_end|>"]


def test_contents_with_blanks_around_them_and_other_alphabets_are_found():
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "  日本 héllo \n\n"}]
    tokenizer, encoded = encode(CHATML, talk)
    assert learnt(tokenizer, encoded) == ["  日本 héllo \n\n<|im_end|>"]
    tokenizer, encoded = encode(HEADERS, talk)
    assert learnt(tokenizer, encoded) == ["日本 héllo<|eot|>"]
    assert encoded.ids.tolist() == stock_ids(tokenizer, talk)


def test_a_conversation_that_ends_with_the_user_keeps_the_end_tokens():
    tokenizer, encoded = encode(CHATML, TALK[:4])
    assert learnt(tokenizer, encoded) == ["how are you?<|im_end|>"]


def test_a_conversation_without_the_assistant_supervises_nothing():
    _, encoded = encode(CHATML, TALK[:2])
    assert not encoded.supervised.any()


def test_spans_that_cannot_be_located_are_an_error_naming_the_row():
    upper = CHATML.replace("{{ m.content }}", "{{ m.content | upper | truncate(4, true, '') }}")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: cannot tell where the content of message 2 is"):
        encode(upper)


def test_tool_calls_that_the_template_does_not_render_are_not_learnt_and_said():
    talk = [*TALK[1:3], TALK[1], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]
    for template in (CHATML, MARKED):
        tokenizer, encoded = encode(template, talk)
        assert learnt(tokenizer, encoded) == ["how are you?<|im_end|>"]
        assert ("calls", "") in encoded.remarks


def test_a_template_that_refuses_a_row_and_a_missing_template_name_the_row():
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: the chat template refused this conversation: no tools"):
        encode("{{ raise_exception('no tools') }}")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1 is a conversation and the tokenizer has no chat template"):
        encode(None)


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("start", ["<s>", "{{ bos_token }}", ""])
def test_there_is_one_start_token_when_either_side_defines_it(start, adds_bos):
    tokenizer, encoded = encode(start + CHATML, adds_bos=adds_bos)
    bos = tokenizer.bos_token_id
    wanted = 1 if start or adds_bos else 0
    assert encoded.ids.tolist().count(bos) == wanted
    assert (encoded.ids[0] == bos) == bool(wanted)
    stock = stock_ids(tokenizer)
    assert encoded.ids.tolist() == (stock if start or not adds_bos else [bos, *stock])
    assert learnt(tokenizer, encoded)[-1] == "paris<|im_end|>"


@pytest.mark.parametrize("talk", [TALK, [{**TALK[1], "content": "what is <s> ?"}, TALK[2]]])
@pytest.mark.parametrize("bos", ["<s>", "<|im_end|>"])
def test_a_start_token_elsewhere_in_a_conversation_does_not_stand_for_the_one_before_it(bos, talk):
    """It may be what ends a turn, or what a user writes."""
    tokenizer = tiny_tokenizer(specials=SPECIALS, bos=bos, eos="</s>", adds_bos=True, template=CHATML)
    row = Row(kind="chat", file=0, number=1, messages=tuple(talk))
    (encoded,) = Encoder(tokenizer).encode([row], ["rows.jsonl:1"])
    assert encoded.ids.tolist() == [tokenizer.bos_token_id, *stock_ids(tokenizer, talk)]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("text", ["hello there", "<s>hello there"])
def test_raw_text_has_its_start_token_once_and_its_end_token(adds_bos, text):
    tokenizer = tiny_tokenizer(bos="<s>", eos="</s>", adds_bos=adds_bos)
    encoded = Encoder(tokenizer).encode([Row(kind="text", file=0, number=1, text=text)], ["rows:1"])[0]
    ids = encoded.ids.tolist()
    assert ids.count(tokenizer.bos_token_id) == (1 if adds_bos or text.startswith("<s>") else 0)
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello there"


def test_prompts_and_completions_use_the_template_unless_told_otherwise():
    row = Row(kind="completion", file=0, number=1, text="what is the capital? ", completion="paris")
    tokenizer = tiny_tokenizer(specials=SPECIALS, bos="<s>", eos="</s>", adds_bos=True, template=CHATML)
    templated = Encoder(tokenizer).encode([row], ["rows:1"])[0]
    assert learnt(tokenizer, templated) == ["paris<|im_end|>"]
    raw = Encoder(tokenizer, form="completion").encode([row], ["rows:1"])[0]
    assert tokenizer.decode(raw.ids) == "<s>what is the capital? paris</s>"
    assert learnt(tokenizer, raw)[0].strip() == "paris</s>"


def _word_tokenizer(kind):
    """Tokenizers that mark blanks as sentencepiece does, and one whose offsets leave blanks out."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from support.tiny_tokenizer import TEXT

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet = []
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace()
    elif kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *SPECIALS],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, "SYSTEM USER ASSISTANT: <>[]/INST\n"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["metaspace", "normalizer", "trimmed"])
def test_spans_do_not_depend_on_how_a_tokenizer_counts_characters(kind):
    tokenizer = _word_tokenizer(kind)
    for template, end in ((CHATML, "<|im_end|>"), (HEADERS, "<|eot|>"), (BRACKETS, " </s>")):
        tokenizer.chat_template = template
        encoded = Encoder(tokenizer).encode([Row(kind="chat", file=0, number=1, messages=TALK)], ["rows:1"])[0]
        contents = ("how are you?", "i am fine, thank you.", "paris")
        assert [text.strip() for text in learnt(tokenizer, encoded)] == [(text + end).strip() for text in contents]
        assert encoded.ids.tolist() == stock_ids(tokenizer)
