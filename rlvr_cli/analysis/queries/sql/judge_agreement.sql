-- How far a judge (--grader judge:RUBRIC.md) agrees with a rule's grades of the same rows, or with --labels: accuracy, Cohen's kappa, where not.
-- :phase = "eval"
-- :step = null
-- :judge = ""
-- :rule = ""
-- plot: none

-- A row for each rollout that a judge was to grade, and each other grade of it; `rlvr analyze judge_agreement` makes its tables of them.
-- Of the grades by one grader the last one counts: a grade of `rlvr grade` replaces the rollout's own.
-- $judge: one of several judges. $rule: the grader to compare with, '' for every one that is no judge. $step null: all steps.
WITH verdicts AS (
    SELECT run_id, phase, step, example_id, sample_index, grader, reward, judgement.reply AS reply
    FROM rollouts ANTI JOIN grades USING (run_id, phase, step, example_id, sample_index, grader)
    UNION ALL
    SELECT run_id, phase, step, example_id, sample_index, grader, reward, judgement.reply AS reply FROM grades
)
SELECT
    a.run_id, a.step, a.example_id, a.sample_index,
    a.grader AS judge, a.reward AS judge_reward,
    b.grader AS rule, b.reward AS rule_reward,
    CASE WHEN b.grader IS NULL OR (a.reward > 0.5) <> (b.reward > 0.5) THEN a.reply END AS reply
FROM verdicts AS a
LEFT JOIN (
    FROM verdicts WHERE CASE WHEN $rule = '' THEN NOT starts_with(grader, 'judge:') ELSE grader = $rule END
) AS b ON (a.run_id, a.phase, a.step, a.example_id, a.sample_index) = (b.run_id, b.phase, b.step, b.example_id, b.sample_index)
    AND a.grader <> b.grader
WHERE a.phase = $phase
    AND ($step IS NULL OR a.step = $step)
    AND starts_with(a.grader, 'judge:')
    AND ($judge = '' OR a.grader = $judge)
ORDER BY run_id, judge, rule, step, example_id, sample_index;
