"""An environment of the library `verifiers` as one of ours: its rollout runs, and what it asks its model the policy says.

Enters: a row of the environment's dataset, the policy's turns, each as JSON {text, calls}. Leaves: the messages since the last turn, and
at the end the reward of the environment's rubric.
"""

import asyncio
import json
import random
from typing import Any

from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.types import Response, ResponseMessage, Tool, ToolCall

from rlvr_cli.data.packages.verifiers import CAUGHT, Caught, members_of, text_of
from rlvr_cli.environments.interface import Reply
from rlvr_cli.types import ENVIRONMENT, Example

_GIVEN_UP_SECONDS = 1.0  # for a rollout to end


class Policy(OpenAIChatCompletionsClient):
    """The client of a rollout. No endpoint is behind it: `asked` is what the rollout waits for, `say` goes on.

    Attributes:
        asked: gets the messages of the next request.

    Args:
        tools: schemas of what the policy is told of.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tools: list[dict[str, Any]]) -> None:
        super().__init__(None)
        self._loop, self._tools = loop, tools
        self.asked, self._said = loop.create_future(), loop.create_future()

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: list[Tool] | None = None, **kwargs: Any
    ) -> Response:
        if self.asked.done():
            raise RuntimeError("the environment asks its model for several turns at once")
        if _schemas(tools) != self._tools:
            own, told = (", ".join(_names_of(schemas)) or "none" for schemas in (_schemas(tools), self._tools))
            raise RuntimeError(
                f"the environment has tools of its own for this row: {own}; the policy is told of {told}"
            )
        messages, _ = await self.to_native_prompt(prompt)
        self.asked.set_result(messages)
        return await self._said

    def say(self, response: Response) -> None:
        """Answer what was asked, so that something else can be."""
        said, self._said, self.asked = self._said, self._loop.create_future(), self._loop.create_future()
        said.set_result(response)


class VerifiersEnvironment:
    """One episode.

    Args:
        environment: of verifiers, for single rollouts; it keeps nothing from rollout to rollout.
        loop: in which the rollouts of this process run, while one of them is asked.
        schemas: what a chat model is told of the environment's tools, by `schemas_of` before any rollout.
    """

    stop = ()
    gives_rewards = True
    marker = ""

    def __init__(self, environment: Any, loop: asyncio.AbstractEventLoop, schemas: list[dict[str, Any]]) -> None:
        self._environment, self._loop, self.schemas = environment, loop, schemas
        self._heard: list[dict[str, Any]] = []
        self._turns = 0

    def begin(self, example: Example, seed: int) -> list[dict[str, Any]]:
        """Begin the rollout, and return what it first asks its model."""
        row = _row_of(example, self._environment.system_prompt)
        self._seed, self._policy = seed, Policy(self._loop, self.schemas)
        self._caught = Caught()
        CAUGHT.set(self._caught)  # the rollout begins with it
        self._rollout = self._loop.create_task(self._environment.run_rollout(row, self._policy, "policy", {}))
        if not self._go_on():
            self._output()
            raise RuntimeError("the rollout ended before it asked its model anything")
        return [message | {"content": text_of(message.get("content"))} for message in self._heard]

    def answer(self, turn: str) -> Reply:
        """Let the rollout go on with what the policy said, to its next question or its end."""
        said = json.loads(turn)
        calls = [
            ToolCall(id=f"{self._turns}-{i}", name=c["name"], arguments=c.get("problem") or json.dumps(c["arguments"]))
            for i, c in enumerate(said["calls"])
        ]
        message = ResponseMessage(
            content=said["text"],
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        self._turns += 1
        before = len(self._heard)
        known = self._heard
        self._caught.tools.clear()
        self._policy.say(Response(id=str(self._turns), created=0, model="policy", message=message))
        if not self._go_on():
            output = self._output()
            return Reply(done=True, reward=float(output["reward"]), measured=_metrics_of(output))
        if self._heard[:before] != known or self._heard[before]["role"] != "assistant" or not self._heard[before + 1 :]:
            raise RuntimeError("the environment rewrites the conversation, and what was sampled stays as it is")
        problems = {call.id: c.get("problem") for call, c in zip(calls, said["calls"], strict=True)}
        names = {call.id: call.name for call in calls}
        return Reply(calls=tuple(self._reply(message, names, problems) for message in self._heard[before + 1 :]))

    def give_up(self) -> None:
        """End the rollout, whose episode ended before it did, and let it put away what it has opened."""
        self._rollout.cancel()
        self._loop.run_until_complete(asyncio.wait({self._rollout}, timeout=_GIVEN_UP_SECONDS))

    def _reply(self, message: dict[str, Any], names: dict[str, str], problems: dict[str, str | None]) -> Reply:
        text = text_of(message.get("content"))
        if message["role"] == "user":
            return Reply(text, role=ENVIRONMENT)
        if message["role"] != "tool":
            raise RuntimeError(f"the environment says something as {message['role']}, not as user or tool")
        call = message["tool_call_id"]
        if names[call] not in _names_of(self.schemas):
            return Reply(text, role="tool", error=problems[call] or f"there is no tool {names[call]}")
        return Reply(text, role=names[call], error=problems[call] or (text if text in self._caught.tools else None))

    def _go_on(self) -> bool:
        """Run the rollout until it asks its model, and keep what it asks; or until it ends, which returns False."""
        random.seed(f"{self._seed} {self._turns}")  # an environment that draws is a function of seed and turns
        asked = self._policy.asked
        self._loop.run_until_complete(
            asyncio.wait({self._rollout, asked}, return_when=asyncio.FIRST_COMPLETED),
        )
        if asked.done():
            self._heard = [dict(message) for message in asked.result()]
        return asked.done()

    def _output(self) -> Any:
        """What the rollout gave. Raises the error with which it ended, or which a reward function raised."""
        output = self._rollout.result()
        if output.get("error"):
            raise RuntimeError(f"the rollout failed: {output['error']}")
        if self._caught.rewards:
            raise RuntimeError("; ".join(self._caught.rewards))
        return output


def schemas_of(environment: Any) -> list[dict[str, Any]]:
    """The schemas of the tools of an environment, or of each in a group."""
    return _schemas(members_of(environment)[0].tool_defs)


def _schemas(tools: list[Tool] | None) -> list[dict[str, Any]]:
    fields = ("name", "description", "parameters")
    return [{"type": "function", "function": {name: getattr(tool, name) for name in fields}} for tool in tools or ()]


def _names_of(schemas: list[dict[str, Any]]) -> list[str]:
    return [schema["function"]["name"] for schema in schemas]


def _metrics_of(output: Any) -> dict[str, float]:
    """What each function of the rubric gave, those without a weight too."""
    return {name: float(value) for name, value in (output.get("metrics") or {}).items()}


def _row_of(example: Example, system_prompt: str | None) -> dict[str, Any]:
    """The row that a rollout begins with: of `data.packages.verifiers`, or made of a question and answer of another dataset."""
    try:
        row = json.loads(example.ground_truth)
    except ValueError:
        row = None
    if isinstance(row, dict) and "prompt" in row:
        return row
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    prompt = [*system, {"role": "user", "content": example.question}]
    return {"prompt": prompt, "answer": example.ground_truth, "example_id": 0, "info": {}}
