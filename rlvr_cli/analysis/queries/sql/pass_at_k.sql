-- Chance that at least one of k samples is correct, over the questions with at least k samples: unbiased (Chen et al. 2021).
-- :k = null
-- :phase = "eval"
-- :step = null
-- plot: x=k y=pass_at_k log=x y_label="share of questions"

-- Without k: 1, 2, 4, ... and the largest number of samples of a question. 1 - C(n - c, k) / C(n, k) for c correct of n samples.
-- A failed grade counts as not correct. The interval is that of Agresti and Coull (1998) for the effective number of draws of k
-- samples, as in `rlvr analyze summary`.
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
        ELSE list_distinct(string_split(trim($k::VARCHAR, '[]'), ',')::BIGINT[]) END
    )::BIGINT AS k
    FROM kinds
    GROUP BY run_id
), chances AS (
    SELECT
        run_id, step, k, n, questions, grade_errors,
        CASE
            WHEN n < k THEN NULL
            WHEN c = 0 THEN 0
            WHEN n - c < k THEN 1
            ELSE 1 - exp(lgamma(n - c + 1) + lgamma(n - k + 1) - lgamma(n - c - k + 1) - lgamma(n + 1))
        END AS chance
    FROM kinds JOIN ks USING (run_id)
), means AS (
    SELECT
        run_id, step, k,
        coalesce(sum(questions) FILTER (n >= k), 0)::BIGINT AS questions,
        sum(questions * chance) / sum(questions) FILTER (n >= k) AS pass_at_k,
        sum(questions * n) FILTER (n >= k) / k AS draws,
        least(sum(questions * (chance > 0)::INT), sum(questions * (chance < 1)::INT)) AS rarer,
        coalesce(sum(questions) FILTER (n < k), 0)::BIGINT AS too_few_samples,
        sum(grade_errors)::BIGINT AS grade_errors
    FROM chances
    GROUP BY run_id, step, k
), spreads AS (
    SELECT
        run_id, k,
        greatest(
            sum(chances.questions * (chance - pass_at_k) ** 2) / any_value(means.questions) ** 2
                / nullif(any_value(pass_at_k * (1 - pass_at_k)), 0),
            1 / any_value(draws)
        ) AS seen  -- how much the questions vary: 1 / the number of independent draws that would vary as much
    FROM chances JOIN means USING (run_id, step, k)
    GROUP BY run_id, k
), effective AS (
    SELECT
        *,
        -- With one question more, whose samples are all alike: then there are as many draws as questions.
        coalesce((rarer + 1) / (rarer * seen + 1 / questions), questions) AS n
    FROM means JOIN spreads USING (run_id, k)
)
SELECT
    run_id, step, k, questions, pass_at_k,
    CASE WHEN questions > 0 THEN share_low(pass_at_k, n) END AS low,
    CASE WHEN questions > 0 THEN share_high(pass_at_k, n) END AS high,
    too_few_samples, grade_errors
FROM effective
ORDER BY run_id, step, k;
