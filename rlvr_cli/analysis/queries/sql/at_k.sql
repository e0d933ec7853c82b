-- pass@k, best@k and majority@k of the same samples, each with its interval, over the questions with at least k samples.
-- :k = null
-- :phase = "eval"
-- :step = null
-- plot: x=k y=pass_at_k+best_at_k+majority_at_k log=x title="Of k samples" y_label="share of questions"

-- The samples of each question, the one with the highest mean log-probability first, from which `rlvr analyze at_k` computes
-- the three; without $k for 1, 2, 4, ... and the largest number of samples of a question. A failed grade counts as no reward.
-- Only whether answers are equal matters, so each is its hash: answers may be long.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
)
SELECT
    run_id, rollouts.step, example_id,
    coalesce(reward, 0) AS reward,
    coalesce(reward > 0.5 AND NOT isnan(reward), false) AS correct,
    CASE WHEN trim(extracted_answer) <> '' THEN hash(trim(extracted_answer)) END AS answer,
    CASE WHEN NOT isnan(mean_logprob) THEN mean_logprob END AS logprob
FROM rollouts JOIN latest USING (run_id)
WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
ORDER BY run_id, example_id, logprob DESC NULLS LAST;
