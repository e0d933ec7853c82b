-- Response lengths in tokens step by step, correct and wrong ones separately: mean, median, 95th percentile, longest, truncated share.
-- :phase = null
-- plot: x=step y=mean,p95,truncated_share panels=phase lines=run_id,responses

SELECT
    run_id,
    phase,
    step,
    CASE
        WHEN reward IS NULL THEN 'ungraded'
        WHEN reward > 0.5 AND NOT isnan(reward) THEN 'correct'
        ELSE 'wrong'
    END AS responses,
    count(*) AS samples,
    avg(policy_tokens(episode, num_response_tokens)) AS mean,
    quantile_cont(policy_tokens(episode, num_response_tokens), 0.5) AS p50,
    quantile_cont(policy_tokens(episode, num_response_tokens), 0.95) AS p95,
    max(policy_tokens(episode, num_response_tokens)) AS longest,
    avg((finish_reason = 'length')::INT) AS truncated_share
FROM rollouts
WHERE phase = coalesce($phase::VARCHAR, phase)
GROUP BY ALL
ORDER BY run_id, phase, step, responses;
