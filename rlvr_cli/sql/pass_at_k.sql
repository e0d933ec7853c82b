-- Chance that at least one of k samples is correct, over the questions with at least k samples: unbiased (Chen et al. 2021).
-- :k = null
-- :phase = "eval"
-- :step = null

-- Without k: 1, 2, 4, ... and the most samples that a question has. 1 - C(n - c, k) / C(n, k) for c correct ones of n.
-- A failed grade is not correct.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), questions AS (
    SELECT
        run_id, rollouts.step, example_id,
        count(*) AS n,
        count(*) FILTER (reward > 0.5 AND NOT isnan(reward)) AS c,
        count(*) FILTER (reward IS NULL) AS grade_errors
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
    GROUP BY ALL
), kinds AS (
    SELECT run_id, step, n, c, count(*) AS questions, sum(grade_errors) AS grade_errors FROM questions GROUP BY ALL
), ks AS (
    SELECT run_id, unnest(
        CASE WHEN $k IS NULL
        THEN list_append([2 ** i FOR i IN range(0, 20) IF 2 ** i < max(n)], max(n))
        ELSE [greatest($k::BIGINT, 1)] END
    )::BIGINT AS k
    FROM kinds
    GROUP BY run_id
)
SELECT
    run_id,
    step,
    k,
    coalesce(sum(questions) FILTER (n >= k), 0)::BIGINT AS questions,
    sum(
        questions * CASE
            WHEN n - c < k THEN 1
            ELSE 1 - exp(lgamma(n - c + 1) + lgamma(n - k + 1) - lgamma(n - c - k + 1) - lgamma(n + 1))
        END
    ) FILTER (n >= k) / sum(questions) FILTER (n >= k) AS pass_at_k,
    coalesce(sum(questions) FILTER (n < k), 0)::BIGINT AS too_few_samples,
    sum(grade_errors)::BIGINT AS grade_errors
FROM kinds JOIN ks USING (run_id)
GROUP BY run_id, step, k
ORDER BY run_id, step, k;
