-- Number of responses by length in tokens, correct and wrong ones separately.
-- :phase = "eval"
-- :step = null
-- :bins = 20
-- plot: x=from_tokens y=correct+wrong panels=run_id bars=yes zeros=correct,wrong title="Response length" y_label=responses

WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), chosen AS (
    SELECT
        run_id, rollouts.step, policy_tokens(episode, num_response_tokens) AS tokens,
        coalesce(reward > 0.5 AND NOT isnan(reward), false) AS correct
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
), width AS (
    SELECT greatest(ceil((max(tokens) + 1) / greatest($bins::BIGINT, 1)), 1)::BIGINT AS width, max(tokens) AS longest FROM chosen
), bins AS (
    SELECT run_id, step, unnest(range(0, longest + 1, width)) AS from_tokens, width
    FROM (SELECT DISTINCT run_id, step FROM chosen), width
)
SELECT
    bins.run_id,
    bins.step,
    from_tokens,
    from_tokens + any_value(bins.width) - 1 AS to_tokens,
    count(*) FILTER (correct) AS correct,
    count(*) FILTER (NOT correct) AS wrong
FROM bins LEFT JOIN chosen ON bins.run_id = chosen.run_id AND chosen.tokens // bins.width * bins.width = from_tokens
GROUP BY bins.run_id, bins.step, from_tokens
ORDER BY run_id, bins.step, from_tokens;
