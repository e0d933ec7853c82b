-- Grades that failed: which error, its commonest text and line, how often, in which steps, and what was being graded.
-- :phase = null
-- :examples = 3
-- plot: x=error y=samples panels=phase bars=yes zeros=samples lines=run_id

WITH failed AS (
    SELECT
        *,
        coalesce(grade_error, 'unknown') AS error,
        count(*) OVER (PARTITION BY run_id, phase, grader, grade_error, grade_error_detail) AS times
    FROM rollouts
    WHERE (reward IS NULL OR grade_error IS NOT NULL) AND phase = coalesce($phase::VARCHAR, phase)
)
SELECT
    run_id,
    phase,
    grader,
    error,
    arg_max(grade_error_detail, (times, grade_error_detail)) AS detail,
    count(*) AS samples,
    count(*) / any_value(all_samples) AS share,
    min(step) AS first_step,
    max(step) AS last_step,
    list(example_id ORDER BY step, example_id, sample_index)[:$examples::BIGINT] AS examples,
    arg_min(ground_truth, (step, example_id, sample_index)) AS ground_truth,
    arg_min(right(response, 120), (step, example_id, sample_index)) AS response_end
FROM failed JOIN (SELECT run_id, phase, count(*) AS all_samples FROM rollouts GROUP BY ALL) USING (run_id, phase)
GROUP BY run_id, phase, grader, error
ORDER BY run_id, phase, samples DESC, error;
