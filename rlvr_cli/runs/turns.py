"""What must hold of the row of an episode.

Enters: its turns, its mask and its number of tokens. Leaves: what is wrong with them.
"""

from collections.abc import Sequence


def broken_turns(
    turns: Sequence[tuple[str, int, int]] | None, mask: Sequence[bool] | None, *, tokens: int, policy_tokens: int
) -> str | None:
    """How the turns of an episode are not its response; None if they are.

    They must follow each other without a gap, the policy's must be exactly those of the mask, and these must be as many as the row says.

    Args:
        turns: (role, start, end); None, as the mask: the policy wrote all of it.
        policy_tokens: that the row says.
    """
    if (turns is None) != (mask is None):
        return "it has turns or a mask, and not the other"
    turns, mask = turns or [("policy", 0, tokens)], mask or [True] * tokens
    place = 0
    for role, start, end in turns:
        if start != place or end < start:
            return f"a turn begins at token {start}, and not at {place}"
        if any(own is not (role == "policy") for own in mask[start:end]):
            return f"the mask does not fit the turn of {role} at token {start}"
        place = end
    if place != tokens:
        return f"its turns have {place} tokens, and the response {tokens}"
    return (
        None
        if sum(mask) == policy_tokens
        else f"{policy_tokens} tokens of the policy are said, and there are {sum(mask)}"
    )
