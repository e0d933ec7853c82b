// An option may be searched for as it is typed: the search would read the dashes before it as NOT.
document.addEventListener("keyup", ({ target }) => {
  if (target.matches(".md-search__input")) target.value = target.value.replace(/^-+|(?<=\s)-+/g, "")
}, { capture: true })
