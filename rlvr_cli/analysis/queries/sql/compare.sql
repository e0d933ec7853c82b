-- Runs on the same questions, or arms of several seeds (A1,A2,A3 B1,B2,B3): each one's difference from the first, and whether data can tell.
-- :phase = "eval"
-- :step = null
-- plot: none

WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
)
SELECT
    run_id,
    rollouts.step,
    example_id,
    count(*) AS samples,
    count(*) FILTER (reward > 0.5 AND NOT isnan(reward)) AS correct,
    count(*) FILTER (reward IS NULL) AS grade_errors,
    any_value(ground_truth) AS ground_truth,
    hash(any_value(prompt)) AS prompt,
    min(grader) AS grader
FROM rollouts JOIN latest USING (run_id)
WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
GROUP BY run_id, rollouts.step, example_id
ORDER BY example_id, run_id;
