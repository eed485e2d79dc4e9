def lpt(grid, limit):
    import heapq, numpy as np
    area=np.diff(grid.area_before); tok=np.diff(grid.cuts)
    heap=[(0,r) for r in range(grid.world_size)]; held=[0]*grid.world_size
    owner=np.zeros(len(area),dtype=np.int64)
    for c in np.lexsort((-tok,-area)).tolist():
        tried=[]
        while heap and held[heap[0][1]]+tok[c]>limit: tried.append(heapq.heappop(heap))
        l,r = heapq.heappop(heap) if heap else tried.pop(0)
        owner[c]=r; held[r]+=int(tok[c])
        heapq.heappush(heap,(l+int(area[c]),r))
        for t in tried: heapq.heappush(heap,t)
    return owner
def swap(grid, owner, a, t): return owner
