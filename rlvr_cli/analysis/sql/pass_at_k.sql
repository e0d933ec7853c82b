-- Chance that at least one of k samples is correct, over the questions with at least k samples: unbiased (Chen et al. 2021).
-- :k = null
-- :phase = "eval"
-- :step = null

-- Without k: 1, 2, 4, ... and the largest number of samples of a question. 1 - C(n - c, k) / C(n, k) for c correct of n samples.
-- A failed grade counts as not correct. The interval is the normal one over questions, 1.96 standard errors, clamped to [0, 1].
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
), chances AS (
    SELECT
        run_id, step, k, n, questions, grade_errors,
        CASE
            WHEN n < k THEN NULL
            WHEN n - c < k THEN 1
            ELSE 1 - exp(lgamma(n - c + 1) + lgamma(n - k + 1) - lgamma(n - c - k + 1) - lgamma(n + 1))
        END AS chance
    FROM kinds JOIN ks USING (run_id)
), means AS (
    SELECT
        run_id, step, k,
        coalesce(sum(questions) FILTER (n >= k), 0)::BIGINT AS questions,
        sum(questions * chance) / sum(questions) FILTER (n >= k) AS pass_at_k,
        sum(questions * chance * chance) / sum(questions) FILTER (n >= k) AS mean_square,
        coalesce(sum(questions) FILTER (n < k), 0)::BIGINT AS too_few_samples,
        sum(grade_errors)::BIGINT AS grade_errors
    FROM chances
    GROUP BY run_id, step, k
)
SELECT
    run_id, step, k, questions, pass_at_k,
    greatest(pass_at_k - 1.96 * sqrt(greatest(mean_square - pass_at_k ** 2, 0) / greatest(questions - 1, 1)), 0) AS low,
    least(pass_at_k + 1.96 * sqrt(greatest(mean_square - pass_at_k ** 2, 0) / greatest(questions - 1, 1)), 1) AS high,
    too_few_samples, grade_errors
FROM means
ORDER BY run_id, step, k;
