-- Responses per category and run: count, share, mean reward, mean length in tokens, truncated share.
-- :phase = "eval"
-- :step = null

WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
)
SELECT
    run_id,
    rollouts.step,
    category,
    count(*) AS samples,
    count(*) / sum(count(*)) OVER (PARTITION BY run_id) AS share,
    avg(coalesce(reward, 0)) AS mean_reward,
    avg(num_response_tokens) AS mean_tokens,
    avg((finish_reason = 'length')::INT) AS truncated_share
FROM rollouts JOIN latest USING (run_id)
WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
GROUP BY run_id, rollouts.step, category
ORDER BY run_id, category = 'grade_error', category DESC;
