"""Environments of verifiers: of one turn, with a tool, groups, and a game that draws, hangs or fails when it is told to."""

import asyncio
import random
import time

import verifiers as vf

from datasets import Dataset


def rows(start, size, step, **info):
    numbers = range(start, start + size)
    asked = [{"question": f"Double {n}.", "answer": str(n * step), "info": {"n": n} | info} for n in numbers]
    return Dataset.from_list(asked)


def lookup(key: str) -> str:
    """Look up a value.

    Args:
        key: Its name.
    """
    return {"moon": "1738"}[key]


def repeat(key: str) -> str:
    """Repeat a word.

    Args:
        key: The word.
    """
    return key


class Late(vf.ToolEnv):
    async def setup_state(self, state):
        if repeat not in self.tools:
            self.add_tool(repeat)
        state["tool_defs"] = self.tool_defs


class Game(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["secret"] = random.randint(1, 1_000_000_000)

    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and "found" in state["trajectory"][-1]["completion"][-1].content

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if "hang" in said:
            time.sleep(60)
        if "rollouts" in said:
            return [vf.UserMessage(content=str(len(asyncio.all_tasks())))]
        if "fail" in said:
            raise ValueError("a game that fails")
        return [vf.UserMessage(content=f"{state['secret']} {random.randint(1, 1_000_000_000)}")]


def load_environment(kind="one", step=2, num=6, grouped=False, wrong=0.25, tokens=-1):
    print("a line of the environment's own")
    if kind == "broken":
        raise ValueError("out of order")

    def right(completion, answer, info):
        assert not info or int(answer) == info["n"] * step  # a question of another dataset has none
        return 1.0 if answer in completion[-1].content else wrong

    def longer(completion):
        return min(len(completion[-1].content), 40) / 40

    async def judged(completion):
        raise OSError("no judge answers")

    def nothing(completion):
        return None

    def alike(completions):
        return [0.0 for _ in completions]

    raising = {"raises": judged, "none": nothing}
    rubric = vf.Rubric(funcs=[alike] if grouped else [right, longer], weights=[1.0] if grouped else [1.0, 0.1])
    if kind in raising:
        rubric = vf.RubricGroup([rubric, vf.Rubric(funcs=[raising[kind]])])
    given = {"dataset": rows(1, num, step), "rubric": rubric, "system_prompt": "Be brief."}
    if kind in ("one", "unscored", *raising):
        return vf.SingleTurnEnv(eval_dataset=rows(101, 4, step), score_rollouts=kind != "unscored", **given)
    if kind == "own_tools":  # of each row
        tool = {"name": "peek", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
        return vf.ToolEnv(tools=[lookup], max_turns=3, **given | {"dataset": rows(1, num, step, tool_defs=[tool])})
    if kind in ("tool", "late_tools"):
        return (vf.ToolEnv if kind == "tool" else Late)(tools=[lookup], max_turns=3, **given)
    if kind in ("same_tools", "other_tools"):
        tools = [[lookup], [repeat if kind == "other_tools" else lookup]]
        return vf.EnvGroup([vf.ToolEnv(tools=each, max_turns=3, **given) for each in tools])
    game = Game(max_turns=4, timeout_seconds=0.05, **given)  # while no policy samples
    game.set_max_total_completion_tokens(tokens)
    return vf.EnvGroup([game]) if kind == "group" else game
