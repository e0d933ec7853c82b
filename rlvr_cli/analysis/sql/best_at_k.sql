-- Mean reward of the sample with the highest mean log-probability among k: best-of-N that needs no verifier.
-- :k = null
-- :phase = "eval"
-- :step = null

-- Without k: 1, 2, 4, ... and the largest number of samples of a question. Of n samples, the i-th best (from 0) is the best
-- of k drawn ones with probability C(n - 1 - i, k - 1) / C(n, k); tied samples all count with their mean reward.
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
        run_id, step,
        count(*) OVER question AS n,
        bool_or(logprob IS NULL) OVER question AS unscored,
        sum(ungraded::INT) OVER question AS grade_errors,
        row_number() OVER (question ORDER BY logprob DESC) - 1 AS i,
        avg(reward) OVER (PARTITION BY run_id, example_id, logprob) AS reward
    FROM samples
    WINDOW question AS (PARTITION BY run_id, example_id)
), kinds AS (
    SELECT
        run_id, step, n, unscored, i, favg(reward) AS reward, count(*) AS questions, sum(grade_errors) AS grade_errors
    FROM ranked
    GROUP BY run_id, step, n, unscored, i
), ks AS (
    SELECT run_id, unnest(
        CASE WHEN $k IS NULL
        THEN list_append([2 ** i FOR i IN range(0, 20) IF 2 ** i < max(n)], max(n))
        ELSE [greatest($k::BIGINT, 1)] END
    )::BIGINT AS k
    FROM kinds
    GROUP BY run_id
), weighted AS (
    SELECT
        *,
        n >= k AND NOT unscored AS counted,
        CASE WHEN n >= k AND k - 1 <= n - 1 - i THEN
            exp(lgamma(n - i) - lgamma(k) - lgamma(n - i - k + 1) - lgamma(n + 1) + lgamma(k + 1) + lgamma(n - k + 1))
        ELSE 0 END AS chance
    FROM kinds JOIN ks USING (run_id)
)
SELECT
    run_id,
    step,
    k,
    coalesce(sum(questions) FILTER (counted AND i = 0), 0)::BIGINT AS questions,
    sum(questions * chance * reward) FILTER (counted) / sum(questions) FILTER (counted AND i = 0) AS best_at_k,
    coalesce(sum(questions) FILTER (n < k AND i = 0), 0)::BIGINT AS too_few_samples,
    coalesce(sum(questions) FILTER (n >= k AND unscored AND i = 0), 0)::BIGINT AS without_logprobs,
    sum(grade_errors) FILTER (i = 0)::BIGINT AS grade_errors
FROM weighted
GROUP BY run_id, step, k
ORDER BY run_id, step, k;
