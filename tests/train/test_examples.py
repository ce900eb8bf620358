"""Which tokens are trained on, as text: ⟦trained on⟧, written from the tokens and their marks."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.errors import ConfigError
from shardwise.train.conversations import Messages, Prompted, Sample
from shardwise.train.examples import Tokenized, tokenize, write
from tests.hf.folders import CHAT_TEMPLATE, END, tiny_tokenizer

CHAT = Messages(
    [
        {"role": "system", "content": "for x"},
        {"role": "user", "content": "name it"},
        {"role": "assistant", "content": "def self"},
        {"role": "user", "content": "items"},
        {"role": "assistant", "content": "in value"},
    ]
)
LINES = CHAT_TEMPLATE.replace("{% endif %}\n{% endfor", "{% endif %}{{ '\\n' }}{% endfor")
BLOCK = "{% generation %}", "{% endgeneration %}"
WITHOUT_BLOCK = LINES.replace(BLOCK[0], "").replace(BLOCK[1], "")
END_OUTSIDE = WITHOUT_BLOCK.replace(
    "{{ message['content'] }}<|im_end|>{% else",
    "{% generation %}{{ message['content'] }}{% endgeneration %}<|im_end|>{% else",
)


def tokenizer(template: str = LINES) -> PreTrainedTokenizerFast:
    tiny = tiny_tokenizer()
    tiny.chat_template = template
    return tiny


def tokenized(
    *samples: Sample,
    by: PreTrainedTokenizerFast | None = None,
    loss_on: str = "assistant",
    context: int = 200,
) -> Tokenized:
    by = by or tokenizer()
    return tokenize([write(sample, by, loss_on) for sample in samples], by, context)


def marked(tokens: Tokenized, by: PreTrainedTokenizerFast | None = None) -> str:
    """All samples, with brackets around what is trained on."""
    by, marks = by or tokenizer(), tokens.examples.trained
    borders = np.flatnonzero(np.diff(marks)) + 1
    runs = zip(np.split(tokens.examples.ids, borders), np.split(marks, borders), strict=True)
    texts = ((str(by.decode(ids)), trained.all()) for ids, trained in runs)
    return "".join(f"⟦{text}⟧" if trained else text for text, trained in texts)


IN_BLOCKS = (
    "<|im_start|>system\nfor x<|im_end|>\n<|im_start|>user\nname it<|im_end|>\n"
    "<|im_start|>assistant\n⟦def self<|im_end|>⟧\n<|im_start|>user\nitems<|im_end|>\n"
    "<|im_start|>assistant\n⟦in value<|im_end|>⟧\n"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LINES, IN_BLOCKS),
        (END_OUTSIDE, IN_BLOCKS),
        (WITHOUT_BLOCK, IN_BLOCKS.replace("<|im_end|>⟧\n", "<|im_end|>\n⟧")),
    ],
)
def test_only_what_the_assistant_says_and_its_end_is_trained_on(
    template: str, expected: str
) -> None:
    assert END_OUTSIDE != WITHOUT_BLOCK != LINES != CHAT_TEMPLATE
    assert marked(tokenized(CHAT, by=tokenizer(template))) == expected


def test_everything_is_trained_on_if_asked() -> None:
    tokens = tokenized(CHAT, loss_on="all")
    assert tokens.examples.trained.all()
    assert marked(tokens) == f"⟦{IN_BLOCKS.replace('⟦', '').replace('⟧', '')}⟧"


def test_an_answer_ends_in_the_end_token_which_is_trained_on() -> None:
    """Also if it is the token of the padding (huggingface/transformers#23530)."""
    by = tokenizer()
    by.pad_token = by.eos_token
    tokens = tokenized(Prompted("def name:", " return x"), by=by)
    assert marked(tokens) == f"def name:⟦ return x{END}⟧"


def test_a_tokenizer_that_adds_its_own_end_and_beginning() -> None:
    from tokenizers.processors import TemplateProcessing

    by = tokenizer()
    special = [(END, by.eos_token_id), ("<|im_start|>", by.convert_tokens_to_ids("<|im_start|>"))]
    by.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<|im_start|> $A {END}", special_tokens=special
    )
    assert marked(tokenized(Prompted("def", " x"), by=by)) == f"<|im_start|>def⟦ x{END}⟧"
    chat = tokenized(CHAT, by=by)  # the template has written them
    assert marked(chat) == IN_BLOCKS


def test_a_template_without_the_end_token_gets_it_once() -> None:
    by = tokenizer(
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    text = marked(tokenized(Messages(CHAT.messages[1:3]), by=by))
    assert text == f"[user] name it\n[assistant]⟦ def self\n{END}⟧"  # " def" is one token


@pytest.mark.parametrize("trims", [False, True])
def test_white_space_counts_where_it_is_also_where_offsets_leave_it_out(trims: bool) -> None:
    """As those of GPT-NeoX and RoBERTa do; an end that the tokenizer adds is after it."""
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

    by = tokenizer()
    end = TemplateProcessing(single=f"$A {END}", special_tokens=[(END, by.eos_token_id)])
    by.backend_tokenizer.post_processor = Sequence([ByteLevel(trim_offsets=trims), end])
    assert marked(tokenized(Prompted("def ", "\n\nx "), by=by)) == f"def ⟦\n\nx {END}⟧"


def test_special_tokens_in_a_document_are_plain_text() -> None:
    tokens = tokenized(Prompted("if", f" {END}"))
    assert (tokens.examples.ids == tokenizer().eos_token_id).sum() == 1
    assert marked(tokens) == f"if⟦ {END}{END}⟧"


def test_text_of_several_bytes_a_token_is_marked_once() -> None:
    assert marked(tokenized(Prompted("é", "naïve"))).endswith(f"ve{END}⟧")
    examples = tokenized(Prompted("é€", "€é")).examples
    assert examples.trained.tolist() == [False] * 5 + [True] * 6


def test_what_is_cut_is_counted_and_a_sample_without_an_answer_left_is_named() -> None:
    short, long = Prompted("if", " x"), Prompted("é€" * 10, " x")
    tokens = tokenized(short, long, Prompted("é", "€" * 9), context=20)
    whole = tokenized(short, long, Prompted("é", "€" * 9))
    assert tokens.left_out == [1]
    assert tokens.cut[0] == 2
    assert tokens.cut[1] == sum(int(n) - 20 for n in whole.examples.lengths if n > 20)
    assert tokens.examples.lengths.tolist() == [whole.examples.lengths[0], 20]
    assert marked(tokens).endswith("⟧")  # it was cut before its end, which is not trained on
    assert np.array_equal(tokens.examples.ids[:3], whole.examples.ids[:3])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the tokenizer has no chat template, .* an -Instruct model; or data.format alpaca"),
        (
            "{% for m in messages %}{% if loop.last %}* {% endif %}{{ m['content'] }}{% endfor %}",
            "the chat template writes what is before message 3 in another way once it is answered",
        ),
        ("{{ raise_exception('no system here') }}", "refuses these messages: no system here"),
        (
            LINES.replace("message['content']", "message['content'][0]['text']"),
            r"leaves out what message 1 .system. says: 'x' is not in the text",
        ),
    ],
)
def test_a_template_that_does_not_show_the_answers(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenized(CHAT, by=tokenizer(template))


def test_where_all_is_trained_on_a_template_need_not_show_the_answers() -> None:
    last = "{% for m in messages %}{% if loop.last %}* {% endif %}{{ m['content'] }};{% endfor %}"
    text = marked(tokenized(CHAT, by=tokenizer(last), loss_on="all"))
    assert text == f"⟦for x;name it;def self;items;* in value;{END}⟧"


def test_a_tokenizer_without_an_end_token() -> None:
    by = tokenizer()
    by.eos_token = None
    with pytest.raises(ConfigError, match=r"has no end token .eos_token.* tokenizer_config.json"):
        tokenized(Prompted("if", "x"), by=by)
