-- Accuracy by subject of multiple-choice questions, with intervals, and the share of responses without a letter.
-- :phase = "eval"
-- :step = null
-- plot: x=subject y=accuracy lines=run_id bars=yes

-- The subject is that of the ground truth; questions without one are one row. A failed grade counts as not correct. The interval is
-- that of Agresti and Coull (1998) for the effective number of samples, as in `rlvr analyze categories`.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), questions AS (
    SELECT
        run_id, rollouts.step,
        json_extract_string(CASE WHEN json_valid(ground_truth) THEN ground_truth END, '$.subject') AS subject,
        example_id,
        count(*) AS n,
        avg(coalesce(reward > 0.5 AND NOT isnan(reward), false)::INT) AS share,
        sum((format_reward < 0.5)::INT) AS unparsed
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND grader = 'multiple_choice' AND rollouts.step = coalesce($step::BIGINT, latest.step)
    GROUP BY ALL
), weighed AS (
    SELECT *, n / sum(n) OVER (PARTITION BY run_id, subject) AS weight FROM questions
), means AS (
    SELECT
        run_id, step, subject,
        count(*) AS questions,
        sum(n)::BIGINT AS samples,
        sum(weight * share) AS accuracy,
        coalesce(sum(unparsed), 0) / sum(n) AS unparsed_share,
        least(sum((share > 0)::INT), sum((share < 1)::INT)) AS rarer,
        sum(weight ** 2) AS alike
    FROM weighed
    GROUP BY ALL
), spreads AS (
    SELECT
        means.run_id, means.subject,
        greatest(
            sum((weight * (share - accuracy)) ** 2) / nullif(any_value(accuracy * (1 - accuracy)), 0),
            1 / any_value(samples)
        ) AS seen  -- how much the questions vary: 1 / the number of independent samples that would vary as much
    FROM weighed JOIN means ON weighed.run_id = means.run_id AND weighed.subject IS NOT DISTINCT FROM means.subject
    GROUP BY ALL
), numbers AS (
    SELECT
        means.*,
        CASE WHEN rarer = 0 THEN 1 / alike ELSE (rarer + 1) / (rarer * seen + alike) END AS effective
    FROM means JOIN spreads ON means.run_id = spreads.run_id AND means.subject IS NOT DISTINCT FROM spreads.subject
)
SELECT
    run_id, step, subject, questions, samples, accuracy,
    share_low(accuracy, effective) AS low, share_high(accuracy, effective) AS high, unparsed_share
FROM numbers
ORDER BY run_id, subject;
