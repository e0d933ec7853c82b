-- How many responses have how many tokens, correct and wrong ones apart (--plot FILE draws it).
-- :phase = "eval"
-- :step = null
-- :bins = 20

WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), chosen AS (
    SELECT run_id, rollouts.step, num_response_tokens AS tokens, coalesce(reward > 0.5 AND NOT isnan(reward), false) AS correct
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
), width AS (
    SELECT greatest(ceil((max(tokens) + 1) / greatest($bins::BIGINT, 1)), 1)::BIGINT AS width FROM chosen
)
SELECT
    run_id,
    step,
    tokens // width * width AS from_tokens,
    tokens // width * width + width - 1 AS to_tokens,
    count(*) FILTER (correct) AS correct,
    count(*) FILTER (NOT correct) AS wrong
FROM chosen, width
GROUP BY ALL
ORDER BY ALL;
