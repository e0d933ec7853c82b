-- Responses per category and run: count, share, mean reward, mean length in tokens, truncated share.
-- :phase = "eval"
-- :step = null
-- plot: x=run_id lines=category y=share counts=samples bars=yes

-- The interval of a share is that of Agresti and Coull (1998) for the effective number of samples, as in `rlvr analyze summary`.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), chosen AS (
    SELECT rollouts.* FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
), questions AS (
    SELECT run_id, sum(n) AS samples, count(*) AS questions, sum(n ** 2) AS squares
    FROM (SELECT run_id, example_id, count(*) AS n FROM chosen GROUP BY run_id, example_id)
    GROUP BY run_id
), hits AS (
    SELECT
        run_id, category,
        sum(hits * hits) - 2 * any_value(share) * sum(hits * n) AS part,  -- sums of whole numbers: exact in any order
        least(count(*), any_value(questions) - count(*) FILTER (hits = n)) AS rarer  -- questions with the rarer outcome
    FROM (
        SELECT
            run_id, example_id, category,
            count(*) AS hits,
            sum(count(*)) OVER (PARTITION BY run_id, example_id) AS n,
            sum(count(*)) OVER (PARTITION BY run_id, category) / sum(count(*)) OVER (PARTITION BY run_id) AS share
        FROM chosen
        GROUP BY run_id, example_id, category
    ) JOIN questions USING (run_id)
    GROUP BY run_id, category
), counts AS (
    SELECT
        run_id, step, category,
        count(*) AS samples,
        count(*) / sum(count(*)) OVER (PARTITION BY run_id) AS share,
        avg(coalesce(reward, 0)) AS mean_reward,
        avg(policy_tokens(episode, num_response_tokens)) AS mean_tokens,
        avg((finish_reason = 'length')::INT) AS truncated_share
    FROM chosen
    GROUP BY run_id, step, category
), effective AS (
    SELECT
        counts.*,
        questions.squares / questions.samples ** 2 AS alike,
        rarer,
        greatest(
            (part + share ** 2 * questions.squares) / questions.samples ** 2 / nullif(share * (1 - share), 0),
            1 / questions.samples
        ) AS seen  -- how much the questions vary: 1 / the number of independent samples that would vary as much
    FROM counts JOIN hits USING (run_id, category) JOIN questions USING (run_id)
), numbers AS (
    SELECT *, CASE WHEN rarer = 0 THEN 1 / alike ELSE (rarer + 1) / (rarer * seen + alike) END AS n FROM effective
)
SELECT
    run_id, step, category, samples, share, share_low(share, n) AS low, share_high(share, n) AS high,
    mean_reward, mean_tokens, truncated_share
FROM numbers
ORDER BY run_id, category = 'grade_error', category DESC;
