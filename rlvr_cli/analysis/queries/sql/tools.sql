-- Which tools episodes call: turns that each answered, with a token or more, episodes that have one, tokens of an answer, and the reward of these episodes.
-- :phase = null

-- A failed grade counts as reward 0.
WITH answers AS (
    SELECT run_id, phase, reward, unnest(turns) AS turn, row_number() OVER () AS number
    FROM rollouts
    WHERE phase = coalesce($phase::VARCHAR, phase) AND episode IS NOT NULL
)

SELECT
    run_id,
    phase,
    turn.role AS tool,
    count(*) AS answers,
    count(DISTINCT number) AS episodes,
    avg(turn.end - turn.start) AS mean_tokens,
    max(turn.end - turn.start) AS most_tokens,
    avg(coalesce(reward, 0)) AS reward
FROM answers
WHERE turn.role <> 'policy'
GROUP BY ALL
ORDER BY run_id, phase, answers DESC;
