-- Estimated entropy (minus the log-probability of the sampled tokens, nats) by position in the response; correct and wrong responses.
-- :phase = "eval"
-- :step = null
-- plot: x=position places=yes y=estimate_correct+estimate_wrong

-- A bucket starts at `position`, counted from 0, and ends before the next power of two.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), tokens AS (
    SELECT
        run_id,
        rollouts.step,
        reward > 0.5 AND NOT isnan(reward) AS correct,
        unnest(range(len(sampled_logprobs))) AS place,
        -unnest(sampled_logprobs) AS surprise,
        unnest(response_mask) AS sampled
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
)
SELECT
    run_id,
    step,
    CASE WHEN place < 2 THEN place ELSE 1::BIGINT << (length(bin(place)) - 1) END AS position,
    count(*) AS tokens,
    avg(surprise) AS estimate,
    avg(surprise) FILTER (correct) AS estimate_correct,
    avg(surprise) FILTER (NOT correct) AS estimate_wrong
FROM tokens
WHERE place IS NOT NULL AND coalesce(sampled, true)  -- tokens of the environment have no log-probability
GROUP BY ALL
ORDER BY run_id, position;
