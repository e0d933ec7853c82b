-- How categories change: category at one step -> category at another step, for the same questions and samples.
-- :phase = "eval"
-- :step_a = null
-- :step_b = null
-- plot: x=category_a lines=category_b y=share_of_category_a panels=run_id counts=samples zeros=share_of_category_a,samples bars=yes title="Category at the later step" y_label="share of the earlier category"

-- By default the first and the last evaluated step.
WITH ends AS (
    SELECT
        run_id,
        coalesce($step_a::BIGINT, min(step)) AS step_a,
        coalesce($step_b::BIGINT, max(step)) AS step_b
    FROM rollouts
    WHERE phase = $phase
    GROUP BY run_id
), a AS (
    SELECT run_id, step_a, example_id, sample_index, category
    FROM rollouts JOIN ends USING (run_id)
    WHERE phase = $phase AND step = step_a
), b AS (
    SELECT run_id, step_b, example_id, sample_index, category
    FROM rollouts JOIN ends USING (run_id)
    WHERE phase = $phase AND step = step_b
)
SELECT
    run_id,
    step_a,
    step_b,
    a.category AS category_a,
    b.category AS category_b,
    count(*) AS samples,
    count(*) / sum(count(*)) OVER (PARTITION BY run_id) AS share,
    count(*) / sum(count(*)) OVER (PARTITION BY run_id, a.category) AS share_of_category_a
FROM a JOIN b USING (run_id, example_id, sample_index)
GROUP BY run_id, step_a, step_b, a.category, b.category
ORDER BY run_id, category_a = 'grade_error', category_a DESC, category_b = 'grade_error', category_b DESC;
