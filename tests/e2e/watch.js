// Notes when (Date.now()) each recovery first stood in the page's list, and when it first had its gap.
(() => {
  const seen = (window.seen = {});
  const look = () => {
    for (const row of document.querySelectorAll("[data-testid=recovery-row]")) {
      const note = (seen[row.dataset.number] ??= { shown: Date.now(), whole: null });
      const gap = row.querySelector("[data-testid=recovery-ms-gap]");
      if (note.whole === null && gap !== null && /\d/.test(gap.textContent)) note.whole = Date.now();
    }
  };
  new MutationObserver(look).observe(document, { childList: true, subtree: true, characterData: true });
})();
