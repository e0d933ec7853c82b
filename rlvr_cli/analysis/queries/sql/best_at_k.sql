-- Mean reward of the sample with the highest mean log-probability among k: best-of-N that needs no verifier.
-- :k = null
-- :phase = "eval"
-- :step = null
-- plot: x=k y=best_at_k log=x y_label="mean reward"

-- Without k: 1, 2, 4, ... and the largest number of samples of a question. Of n samples, the i-th best (from 0) is the best
-- of k drawn ones with probability C(n - 1 - i, k - 1) / C(n, k); tied samples all count with their mean reward. The interval is
-- that of pass_at_k, or NULL where a reward is not within 0 to 1.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), samples AS (
    SELECT
        run_id, rollouts.step, example_id,
        coalesce(reward, 0) AS reward,
        reward IS NULL AS ungraded,
        CASE WHEN NOT isnan(mean_logprob) THEN mean_logprob END AS logprob
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
), ranked AS (
    SELECT
        run_id, step, example_id,
        count(*) OVER question AS n,
        bool_or(logprob IS NULL) OVER question AS unscored,
        sum(ungraded::INT) OVER question AS grade_errors,
        row_number() OVER (question ORDER BY logprob DESC) - 1 AS i,
        avg(reward) OVER (PARTITION BY run_id, example_id, logprob) AS reward
    FROM samples
    WINDOW question AS (PARTITION BY run_id, example_id)
), questions AS (
    SELECT run_id, step, example_id, n, unscored, list(reward ORDER BY i) AS rewards, any_value(grade_errors) AS grade_errors
    FROM ranked
    GROUP BY run_id, step, example_id, n, unscored
), ks AS (
    SELECT run_id, unnest(
        CASE WHEN $k IS NULL
        THEN list_append([2 ** i FOR i IN range(0, 20) IF 2 ** i < max(n)], max(n))
        ELSE list_distinct(string_split(trim($k::VARCHAR, '[]'), ',')::BIGINT[]) END
    )::BIGINT AS k
    FROM questions
    GROUP BY run_id
), chances AS (
    SELECT
        *,
        n >= k AND NOT unscored AS counted,
        -- Rounded, because a question whose samples are all right must not count as one that shows the rarer outcome.
        CASE WHEN n >= k AND NOT unscored THEN round(list_sum([
            rewards[i + 1]
            * exp(lgamma(n - i) - lgamma(k) - lgamma(n - i - k + 1) - lgamma(n + 1) + lgamma(k + 1) + lgamma(n - k + 1))
            FOR i IN range(0, n - k + 1)
        ]), 12) END AS best
    FROM questions JOIN ks USING (run_id)
), means AS (
    SELECT
        run_id, step, k,
        count(*) FILTER (counted) AS questions,
        favg(best) AS best_at_k,
        sum(n) FILTER (counted) / k AS draws,
        least(sum((best > 0)::INT), sum((best < 1)::INT)) AS rarer,
        min(best) < 0 OR max(best) > 1 AS unbounded,
        count(*) FILTER (n < k) AS too_few_samples,
        count(*) FILTER (n >= k AND unscored) AS without_logprobs,
        sum(grade_errors)::BIGINT AS grade_errors
    FROM chances
    GROUP BY run_id, step, k
), spreads AS (
    SELECT
        run_id, k,
        greatest(
            sum((best - best_at_k) ** 2) / any_value(means.questions) ** 2 / nullif(any_value(best_at_k * (1 - best_at_k)), 0),
            1 / any_value(draws)
        ) AS seen  -- how much the questions vary: 1 / the number of independent draws that would vary as much
    FROM chances JOIN means USING (run_id, step, k)
    GROUP BY run_id, k
), effective AS (
    SELECT *, coalesce((rarer + 1) / (rarer * seen + 1 / questions), questions) AS n
    FROM means JOIN spreads USING (run_id, k)
)
SELECT
    run_id, step, k, questions, best_at_k,
    CASE WHEN questions > 0 AND NOT unbounded THEN share_low(best_at_k, n) END AS low,
    CASE WHEN questions > 0 AND NOT unbounded THEN share_high(best_at_k, n) END AS high,
    too_few_samples, without_logprobs, grade_errors
FROM effective
ORDER BY run_id, step, k;
