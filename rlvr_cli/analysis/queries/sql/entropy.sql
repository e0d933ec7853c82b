-- Entropy step by step, in nats per token: exact, and estimated from the sampled tokens; for correct and for wrong responses.
-- :phase = null
-- plot: x=step y=entropy+entropy_correct+entropy_wrong panels=phase

-- The estimate is minus the mean log-probability of the sampled tokens: the Monte Carlo estimate of the entropy of the
-- distribution that was sampled from. It is all there is if the engine does not return the exact entropy; for a greedy run
-- it only shows how certain the policy was. Here every sampled token counts the same; the summary's mean_entropy and the metric
-- entropy/mean are means over responses, in which tokens of short responses count more.
SELECT
    run_id,
    phase,
    step,
    sum(mean_entropy * tokens) / sum(tokens) FILTER (mean_entropy IS NOT NULL) AS entropy,
    sum(mean_entropy * tokens) FILTER (correct)
        / sum(tokens) FILTER (correct AND mean_entropy IS NOT NULL) AS entropy_correct,
    sum(mean_entropy * tokens) FILTER (wrong)
        / sum(tokens) FILTER (wrong AND mean_entropy IS NOT NULL) AS entropy_wrong,
    sum(surprise * tokens) / sum(tokens) FILTER (surprise IS NOT NULL) AS estimate,
    sum(surprise * tokens) FILTER (correct) / sum(tokens) FILTER (correct AND surprise IS NOT NULL) AS estimate_correct,
    sum(surprise * tokens) FILTER (wrong) / sum(tokens) FILTER (wrong AND surprise IS NOT NULL) AS estimate_wrong
FROM (
    SELECT
        run_id, phase, step, mean_entropy,
        -mean_logprob AS surprise,
        nullif(coalesce(list_count(list_filter(response_mask, lambda own: own)), num_response_tokens), 0) AS tokens,  -- sampled
        reward > 0.5 AND NOT isnan(reward) AS correct,
        NOT (reward > 0.5 AND NOT isnan(reward)) AS wrong
    FROM rollouts
    WHERE phase = coalesce($phase::VARCHAR, phase)
)
GROUP BY run_id, phase, step
ORDER BY run_id, phase, step;
