"""What follows an assistant's turn in the chat template of a model: the answers to it, up to where its next turn begins.

Enters: the ids so far, and messages. Leaves: the ids that come next. Ids that were sampled are neither rendered nor tokenized again.

Two ways lead there. The package `renderers` extends the ids of the models that it knows. For all others a conversation is rendered in
which a placeholder is the assistant's turn, and what comes after the placeholder is taken. `NextTurn` tries before anything is
sampled whether the chat template can do it, and says which way is used.
"""

from collections.abc import Callable, Sequence
from itertools import chain, pairwise

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.tokens.calls import Call, form_of, spoken
from rlvr_cli.models.tokens.chat import ChatTemplate, Message, num_shared, tool_call, tool_message, with_call_ids
from rlvr_cli.models.tokens.markers import Markers
from rlvr_cli.models.tokens.renderer import Renderer
from rlvr_cli.text import with_texts

_QUESTION: Message = {"role": "user", "content": "1 + 1?"}
_HINT = (
    "Use another model; or leave --chat out where the environment needs no messages: it then answers in the text of a "
    "prompt of your own (--prompt FILE)."
)


class NextTurn:
    """The turns of a conversation in a chat template.

    Attributes:
        end: the token that ends an assistant's turn.
        way: how the next turn is found, in a sentence.

    Args:
        chat: with the tools that the policy may call.
        ends: the ids that end a response of the model.
        model: as the user names it; `renderers` knows models by their names.
        markers: of the tokenizer, if they are known.

    Raises:
        RlvrError: the chat template cannot go on after an assistant's turn, and why.
    """

    def __init__(
        self, chat: ChatTemplate, *, ends: Sequence[int], model: str = "", markers: Markers | None = None
    ) -> None:
        self.chat, self.markers = chat, markers or Markers(chat.tokenizer, name=chat.name)
        self._end_ids = frozenset(ends)
        self._ends = {text for text, i in self.markers.ids_of.items() if i in ends}
        self._place = f"{self.markers.stem}turn"
        self._calls = False  # whether an assistant's turn before a tool's answer must hold the call
        self._shown: set[tuple[str, ...]] = set()  # the roles of prompts that the chat template shows
        self._frames: dict[tuple[str, ...], list[str]] = {}
        self._check()
        self.end = self._ids_after([self._probe()])[0]
        self._renderer = Renderer.of(model, chat, self.markers)
        problem = self._disagreement()
        if problem:
            self._renderer = None
        self._read: Callable[[str], list[Call]] | None = None  # None: only `renderers` knows the form of calls
        if chat.tools:
            (end,) = (text for text, i in self.markers.ids_of.items() if i == self.end)
            try:
                self._read = form_of(chat, end=end)
            except RlvrError:
                if self._renderer is None:
                    raise
        self.way = (
            "the next turn is what renderers gives, and where it gives nothing, the difference of two renderings"
            if self._renderer
            else f"the next turn is the difference of two renderings{f' ({problem})' if problem else ''}"
        )

    def prompt(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """A conversation up to where the first answer begins: its text and its ids.

        Raises:
            RlvrError: the chat template fails, or leaves out or repeats messages of these roles.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._shown:
            self._check_shown(messages)
            self._shown.add(roles)
        return self._prompt(messages)

    def _prompt(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        rendered = self.chat.render(self._hidden(self.chat.with_system(messages)))
        return self.markers.shown(rendered), self.markers.prompt_ids(rendered)

    def _check_shown(self, messages: Sequence[Message]) -> None:
        """Raise RlvrError if the chat template leaves out or repeats messages of these roles in a prompt."""
        contents = [f"{self.markers.stem}content{number}c" for number in range(len(messages))]
        named = [message | {"content": content} for message, content in zip(messages, contents, strict=True)]
        rendered = self.chat.render(self.chat.with_system(named))
        lost = [m["role"] for m, content in zip(messages, contents, strict=True) if rendered.count(content) != 1]
        if lost:
            raise RlvrError(
                f"The chat template of {self.chat.name} leaves out or repeats messages of the role {' and '.join(dict.fromkeys(lost))}.",
                "Use roles that it knows, such as user.",
            )

    def after(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[list[int]]:
        """The ids that follow an assistant's turn: of each message that answers it; what begins the next turn is of the last one.

        Args:
            prompt_ids, response_ids: all ids so far.
            messages: the answers, of the role `user` or `tool`.

        Raises:
            RlvrError: the chat template fails, or makes markers of a text.
        """
        hidden, ended = self._hidden(messages), any(i in self._end_ids for i in response_ids[-1:])
        own = self._ids_after(hidden)[ended:]
        extended = self._renderer.after(prompt_ids, response_ids, hidden) if self._renderer else None
        ids = own if extended is None else extended
        cuts = [0]
        for number in range(1, len(messages)):  # so many messages give the same ids up to where the next one begins
            fewer = self._ids_after(hidden[:number])[ended:]
            cuts.append(len(ids) - len(own) + num_shared(fewer, own))
        return [ids[start:end] for start, end in pairwise([*cuts, len(ids)])]

    def calls(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[Call]:
        """The calls in a turn, which follows the ids of `prompt_ids`."""
        text, begun = (
            str(self.chat.tokenizer.decode([*part], clean_up_tokenization_spaces=False)) for part in (ids, prompt_ids)
        )
        for end in self._ends:
            text = text.removesuffix(end)
        text = spoken(text, thinks=begun.rstrip().endswith("<think>"))
        if self._read is not None:
            return self._read(text)
        assert self._renderer is not None, "a conversation without tools"
        return self._renderer.calls(prompt_ids, ids) if text else []

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[int], list[bool]]:
        """The ids of a conversation that is given, turn by turn as those of an episode: of its prompt, of what follows, and of
        the latter which are the assistant's.

        Args:
            messages: they end with a turn of the assistant, and no two of these follow each other. Calls without an id get one.

        Raises:
            RlvrError: the chat template fails, or writes a turn elsewhere than where the generation prompt ends.
        """
        messages = with_call_ids(messages)
        start = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        _, prompt = self._prompt(messages[:start])
        ids: list[int] = []
        mask: list[bool] = []
        heard: list[Message] = []
        for message in messages[start:]:
            if message["role"] != "assistant":
                heard.append(message)
                continue
            said = list(chain.from_iterable(self.after(prompt, ids, heard))) if heard else []
            own = self._assistant(message)
            ids += [*said, *own]
            mask += [False] * len(said) + [True] * len(own)
            heard = []
        return prompt, ids, mask

    def _assistant(self, message: Message) -> list[int]:
        """The ids of an assistant's turn, with its end."""
        asked = self.chat.with_system([_QUESTION])
        own = with_texts(message, lambda text: self.markers.hide(text, only=self._ends))  # its calls and thinking too
        if not message.get("tool_calls"):
            own["content"] = self._with_end(message["content"])
        begun, whole = self.chat.render(asked), self.chat.render([*asked, own], answered=False)
        if not whole.startswith(begun):
            raise RlvrError(
                f"The chat template of {self.chat.name} does not put an assistant's turn where its generation prompt ends.",
                "Write these traces as `turns`, or as `prompt` and `response`.",
            )
        turn = whole[len(begun) :]
        end = self._first_end(turn)
        if end is None:
            raise RlvrError(f"The chat template of {self.chat.name} does not end an assistant's turn.", _HINT)
        return self.markers.ids_behind(begun, turn[: sum(end)])

    def _with_end(self, text: str) -> str:
        """An assistant's text whose end tokens are to be read as text, but for the first of those at its end, as some datasets have it."""
        said, end = text, ""
        while last := max((end for end in self._ends if said.rstrip().endswith(end)), key=len, default=""):
            said, end = said.rstrip().removesuffix(last), last
        return self.markers.hide(said, only=self._ends) + end

    def _hidden(self, messages: Sequence[Message]) -> list[Message]:
        return [message | {"content": self.markers.hide(message["content"])} for message in messages]

    def _probe(self, content: str = "2", number: int = 0) -> Message:
        """A message that answers a turn."""
        if self.chat.tools:
            return tool_message(self.chat.tools[0]["function"]["name"], content, number)
        return {"role": "user", "content": content}

    def _after(self, messages: Sequence[Message]) -> str:
        """What the chat template writes from the end of an assistant's turn on."""
        text = self._text_after(messages)
        key = tuple(message["role"] for message in messages)
        if key not in self._frames:
            self._check_heard(messages)
            plain = self._text_after([message | {"content": "2"} for message in messages])
            self._frames[key] = self.markers.in_order(plain)
        if self.markers.in_order(text) != self._frames[key]:
            raise RlvrError(f"The chat template of {self.chat.name} writes other markers for some texts.", _HINT)
        return text

    def _check_heard(self, messages: Sequence[Message]) -> None:
        """Raise RlvrError if the chat template leaves out or repeats messages of these roles."""
        content = f"{self.markers.stem}content"
        if self._text_after([message | {"content": content} for message in messages]).count(content) != len(messages):
            roles = " and ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise RlvrError(
                f"The chat template of {self.chat.name} leaves out or repeats what answers a turn, of the role {roles}.",
                f"An environment of your own may answer as `environment`, which is the user. {_HINT}",
            )

    def _ids_after(self, messages: Sequence[Message]) -> list[int]:
        return self.markers.ids(self._after(messages))

    def _text_after(self, messages: Sequence[Message]) -> str:
        rendered = self.chat.render([*self._begun(messages), *messages])
        if rendered.count(self._place) != 1:
            raise RlvrError(f"The chat template of {self.chat.name} leaves out or repeats an assistant's turn.", _HINT)
        rest = rendered.partition(self._place)[2]
        end = self._first_end(rest)
        if end is None or (rest[: end[0]].strip() and not self._holds_calls(messages)):
            raise RlvrError(
                f"The chat template of {self.chat.name} does not end an assistant's turn with a token that ends the model's responses: "
                f"it goes on with {self.markers.shown(rest)[:40]!r}, and these are {', '.join(sorted(self._ends)) or 'none'}.",
                "The model's generation_config.json names them (eos_token_id). " + _HINT,
            )
        return rest[end[0] :]

    def _first_end(self, text: str) -> tuple[int, int] | None:
        """Where the first end token stands, and its length; None if there is none."""
        places = [(text.find(end), len(end)) for end in self._ends if end in text]
        return min(places, default=None)

    def _begun(self, messages: Sequence[Message]) -> list[Message]:
        """A conversation whose last turn is the assistant's, with the placeholder."""
        turn: Message = {"role": "assistant", "content": self._place}
        if self._holds_calls(messages):
            calls = [tool_call(self._place if m is messages[-1] else "f", {}, i) for i, m in enumerate(messages)]
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
        return [*self.chat.with_system([_QUESTION]), turn]

    def _holds_calls(self, messages: Sequence[Message]) -> bool:
        """Whether the assistant's turn before these messages is written with calls."""
        return self._calls and messages[0]["role"] == "tool"

    def _check(self) -> None:
        """Raise RlvrError unless the chat template goes on after an assistant's turn, and the ids so far stay as they are."""
        one = [self._probe()]
        try:
            self._after(one)
        except RlvrError:
            if not self.chat.tools:
                raise
            self._calls = True
        begun, rendered = self.chat.render(self._begun(one)[:-1]), self.chat.render([*self._begun(one), *one])
        short, long = sorted((begun, rendered.partition(self._place)[0]), key=len)
        if not long.startswith(short) or not (self._calls or _is_thinking(long[len(short) :])):
            raise RlvrError(
                f"The chat template of {self.chat.name} changes what comes before an answer, once the answer is followed by another turn.",
                _HINT,
            )
        content = f"{self.markers.stem}content"
        for messages in ([self._probe("")], [self._probe(content)], [self._probe(content), self._probe(content, 1)]):
            if messages[1:] and not self.chat.tools:
                continue
            if self._after(messages).count(content) != sum(message["content"] == content for message in messages):
                raise RlvrError(
                    f"The chat template of {self.chat.name} leaves out or repeats what answers a turn.", _HINT
                )
        later = [*self._begun(one), *one, self._begun(one)[-1], *one]
        if self.chat.render(later).rpartition(self._place)[2] != rendered.rpartition(self._place)[2]:
            raise RlvrError(f"The chat template of {self.chat.name} writes other text after a later turn.", _HINT)
        if not self.chat.tools:  # a given conversation may have calls of tools that nobody was told of
            self._calls = not self._writes_answers()
            self._calls = self._calls and self._writes_answers()

    def _writes_answers(self) -> bool:
        """Whether the chat template writes what a tool answers."""
        try:
            self._after([tool_message("f", "2", 0)])
        except RlvrError:
            return False
        return True

    def _disagreement(self) -> str:
        """Why `renderers` is not used for this model though it knows it; empty: it is, or does not."""
        if self._renderer is None:
            return ""
        _, prompt = self._prompt([_QUESTION])
        own = self._ids_after([self._probe()])
        theirs = self._renderer.after(prompt, [self.end], [self._probe()])
        return "" if theirs == own[1:] else "renderers knows the model, and writes other tokens than its chat template"


def _is_thinking(text: str) -> bool:
    """Whether a text is the markup of a thinking without words."""
    return not text.replace("<think>", "").replace("</think>", "").strip()
