"""The token ids of traces: what cannot be encoded is said with the trace's name."""

import pytest

from chat_models import MISTRAL_TEMPLATE, sentencepiece_tokenizer
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.tokens.chat import ChatTemplate
from rlvr_cli.models.tokens.next_turn import NextTurn
from rlvr_cli.training.traces import encode_traces
from rlvr_cli.types import Conversation, Example


def test_a_conversation_that_the_chat_template_refuses_is_named():
    tokenizer = sentencepiece_tokenizer(MISTRAL_TEMPLATE, prepends=True)
    turns = NextTurn(ChatTemplate("mistral", tokenizer=tokenizer), ends=[tokenizer.eos_token_id])
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    said.append({"role": "assistant", "content": "2"})
    examples = [
        Example(
            f"talk-{number}",
            "1 + 1?",
            "",
            prompt="1 + 1?",
            response="2",
            conversation=Conversation(tuple(messages), None),
        )
        for number, messages in enumerate((said[1:], said), start=1)
    ]
    with pytest.raises(RlvrError) as caught:
        encode_traces(examples, {}, tokenizer, append_eos=True, chat=lambda _: turns)
    assert caught.value.problem == (
        "Trace talk-2: The chat template of mistral fails (TemplateError: Only user, assistant and tool)."
    )
    assert caught.value.hint.startswith("Remove or change the row")
