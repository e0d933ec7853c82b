-- Where graders disagree (rlvr grade adds the second one): counts, share, Cohen's kappa, and the first rollouts that they judge differently.
-- :phase = "eval"
-- :step = null
-- :grader = ""
-- :against = ""
-- :examples = 3
-- :by_step = false
-- plot: y=disagreement,kappa lines=run_id,grader,against

-- $grader: a grader in `grades`, '' for all of them. $against: another grader in `grades`, or the run's own one; '' for the latter.
-- $step null: all steps. Where one of the two grades failed there is no verdict: `left_out` counts these.
WITH verdicts AS (
    SELECT run_id, phase, step, example_id, sample_index, grader, reward > 0.5 AND NOT isnan(reward) AS ok
    FROM grades
),
judged AS (
    SELECT
        a.run_id, a.step, a.example_id, a.sample_index, a.grader,
        coalesce(b.grader, r.grader) AS against,
        a.ok AS first_ok,
        CASE WHEN b.grader IS NULL THEN r.reward > 0.5 AND NOT isnan(r.reward) ELSE b.ok END AS second_ok,
        'step ' || a.step || ', ' || a.example_id || ', sample ' || a.sample_index AS place
    FROM verdicts AS a
    JOIN rollouts AS r USING (run_id, phase, step, example_id, sample_index)
    LEFT JOIN (FROM verdicts WHERE grader = $against) AS b USING (run_id, phase, step, example_id, sample_index)
    WHERE a.phase = $phase
      AND ($step IS NULL OR a.step = $step)
      AND ($grader = '' OR a.grader = $grader)
      AND a.grader <> $against
      AND ($against IN ('', r.grader) OR b.grader IS NOT NULL)
),
counts AS (
    SELECT
        run_id, grader, against, CASE WHEN $by_step THEN step END AS step,
        count(first_ok = second_ok) AS samples, -- NULL where one failed
        count(*) - samples AS left_out,
        count(*) FILTER (first_ok AND second_ok) AS both_right,
        count(*) FILTER (first_ok AND NOT second_ok) AS only_grader,
        count(*) FILTER (second_ok AND NOT first_ok) AS only_against,
        count(*) FILTER (NOT first_ok AND NOT second_ok) AS neither,
        list(place ORDER BY step, example_id, sample_index) FILTER (first_ok AND NOT second_ok)[: $examples] AS only_grader_examples,
        list(place ORDER BY step, example_id, sample_index) FILTER (second_ok AND NOT first_ok)[: $examples] AS only_against_examples
    FROM judged
    GROUP BY run_id, grader, against, CASE WHEN $by_step THEN step END
)
SELECT
    run_id, grader, against, step, samples, both_right, only_grader, only_against, neither, left_out,
    (only_grader + only_against) / nullif(samples, 0) AS disagreement,
    ((both_right + neither) / nullif(samples, 0) - chance) / nullif(1 - chance, 0) AS kappa,
    only_grader_examples,
    only_against_examples
FROM (
    SELECT
        *,
        ((both_right + only_grader) / samples) * ((both_right + only_against) / samples)
        + ((neither + only_against) / samples) * ((neither + only_grader) / samples) AS chance
    FROM counts
)
ORDER BY run_id, grader, against, step;
